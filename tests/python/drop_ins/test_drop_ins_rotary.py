"""The rotary embedding of the modules that stand in for FlashAttention's."""

import pytest

torch = pytest.importorskip("torch")
from drop_ins import int32, make, turned  # noqa: E402

from fulgur.flash_attn.layers import rotary  # noqa: E402


class TestRotary:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_turns_pairs(self, interleaved):
        """As complex numbers that are multiplied."""
        (x,) = make((2, 5, 3, 12))
        angles = torch.rand(9, 4)
        got = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=2)
        turned, rest = x[..., :8], x[..., 8:]
        pairs = turned.unflatten(-1, (4, 2)) if interleaved else turned.unflatten(-1, (2, 4)).mT
        result = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles[2:7, None])
        result = torch.view_as_real(result)
        want = (result if interleaved else result.mT).flatten(-2)
        torch.testing.assert_close(got, torch.cat([want, rest], -1))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_is_rounded_once(self, interleaved):
        x, angles = make((1, 64, 5, 40))[0].bfloat16(), 6 * torch.rand(64, 16)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        got = rotary.apply_rotary_emb(x, cos, sin, interleaved)
        # Products of bf16 are exact in float32, so this is what kernels compute, whichever way they add.
        assert torch.equal(got[0], turned(x[0], cos, sin, interleaved).float().bfloat16())

    def test_packed_and_offsets(self):
        (x,) = make((2, 4, 3, 8))
        angles = torch.rand(9, 4)
        cos, sin, offsets = angles.cos(), angles.sin(), torch.tensor([3, 0])
        want = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        torch.testing.assert_close(want[:1], rotary.apply_rotary_emb(x[:1], cos, sin, seqlen_offsets=3))
        rows = torch.cat([x[0, :2], x[1], x[0, :1]])  # the last is padding
        got = rotary.apply_rotary_emb(
            rows, cos, sin, seqlen_offsets=offsets, cu_seqlens=int32(0, 2, 6), max_seqlen=4
        )
        torch.testing.assert_close(got[:6], torch.cat([want[0, :2], want[1]]))

    def test_wrong_arguments(self):
        (x,) = make((2, 4, 3, 8))
        angles, call = torch.rand(5, 4), rotary.apply_rotary_emb
        with pytest.raises(ValueError, match="^cos: got 3 positions, want 4"):
            call(x, angles[:3], angles[:3])
        with pytest.raises(ValueError, match="^cos: got 5 positions, want 6"):
            call(x, angles, angles, seqlen_offsets=2)
        with pytest.raises(ValueError, match="^cos: got 5 positions, want 7"):
            call(x[0], angles, angles, seqlen_offsets=3, cu_seqlens=int32(0, 4), max_seqlen=4)
        with pytest.raises(ValueError, match="^cos: got 5 columns, want at most half of the 8 of x"):
            call(x, torch.rand(5, 5), torch.rand(5, 5))
        with pytest.raises(ValueError, match="^sin: got shape .5, 3., want .5, 4. as cos"):
            call(x, angles, angles[:, :3])
        # On a device a wrong place would end the process, so places in a tensor are valid ones.
        got = call(x, angles, angles, seqlen_offsets=torch.tensor([0, 9]))
        torch.testing.assert_close(got[1], call(x[1:], angles[4:].expand(4, 4), angles[4:].expand(4, 4))[0])

    def test_in_place(self):
        (x,) = make((1, 4, 2, 8))
        cos, sin = torch.rand(2, 4, 4)
        want = rotary.apply_rotary_emb(x, cos, sin)
        assert rotary.apply_rotary_emb(x, cos, sin, inplace=True) is x
        assert torch.equal(x, want)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_packed_with_v(self, scaled):
        (qkv,) = make((2, 4, 3, 2, 8))
        cos, sin, cos_k, sin_k = torch.rand(4, 6, 4)
        of_k = (cos_k, sin_k) if scaled else (cos, sin)
        options = dict(interleaved=True, seqlen_offsets=torch.tensor([2, 0]))
        q = rotary.apply_rotary_emb(qkv[:, :, 0], cos, sin, **options)
        k = rotary.apply_rotary_emb(qkv[:, :, 1], *of_k, **options)
        want = torch.stack([q, k, qkv[:, :, 2]], 2)
        given = dict(cos_k=cos_k, sin_k=sin_k) if scaled else {}
        flat = qkv.flatten(2, 3).clone()  # two heads each
        assert rotary.apply_rotary_emb_qkv_(flat, cos, sin, num_heads_q=2, **given, **options) is flat
        assert torch.equal(flat, want.flatten(2, 3))
        kv = qkv[:, :, 1:].clone()
        assert rotary.apply_rotary_emb_qkv_(qkv, cos, sin, **given, **options) is qkv
        assert torch.equal(qkv, want)
        assert rotary.apply_rotary_emb_kv_(kv, *of_k, **options) is kv
        assert torch.equal(kv, want[:, :, 1:])

    def test_packed_with_v_has_gradients(self):
        (qkv,), (cos, sin) = make((1, 3, 3, 2, 4)), torch.rand(2, 3, 2, dtype=torch.float64)
        qkv = qkv.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: rotary.apply_rotary_emb_qkv_(x.clone(), cos, sin), qkv)

    def test_packed_with_v_wrong_arguments(self):
        (qkv,), angles = make((1, 4, 7, 8)), torch.rand(4, 4)
        call = rotary.apply_rotary_emb_qkv_
        errors = {None: "got None, want the heads of q", 4: "got 4, want to leave", 7: "got 7", 0: "got 0"}
        for heads, error in errors.items():
            with pytest.raises(ValueError, match=f"^num_heads_q: {error}"):
                call(qkv, angles, angles, num_heads_q=heads)
        with pytest.raises(ValueError, match="^sin_k: got None, want it with cos_k"):
            call(qkv, angles, angles, cos_k=angles, num_heads_q=3)
        for name, call in (("qkv", call), ("kv", rotary.apply_rotary_emb_kv_)):
            with pytest.raises(ValueError, match=f"^{name}: got shape .1, 4, 7, 1, 8., want .batch, seqlen, [23]"):
                call(qkv.unsqueeze(3), angles, angles)
        with pytest.raises(ValueError, match="^qkv: got shape .4, 8., want 4 or 5 dimensions"):
            rotary.apply_rotary_emb_qkv_(qkv[0, :, 0], angles, angles)


class TestRotaryEmbedding:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_angles(self, interleaved):
        (qkv,) = make((2, 5, 3, 2, 10))
        angles = torch.arange(7)[:, None] * 100.0 ** -(torch.arange(4) / 4)
        want = rotary.apply_rotary_emb_qkv_(
            qkv.clone(), angles.cos(), angles.sin(), interleaved=interleaved, seqlen_offsets=2
        )
        call = rotary.RotaryEmbedding(8, base=100, interleaved=interleaved)
        torch.testing.assert_close(call(qkv.clone(), seqlen_offset=2), want)
        flat = call(qkv.clone().flatten(2, 3), seqlen_offset=2, num_heads_q=2)
        torch.testing.assert_close(flat, want.flatten(2, 3))
        q, kv = call(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=torch.tensor([2, 2]))
        torch.testing.assert_close(torch.cat([q.unsqueeze(2), kv], 2), want)
        assert not call.state_dict()

    @pytest.mark.parametrize("scale_base", [None, 16])
    def test_scores_depend_on_distances_alone(self, scale_base):
        call = rotary.RotaryEmbedding(8, scale_base=scale_base)
        qkv = make((1, 1, 3, 1, 8))[0].expand(1, 6, 3, 1, 8)  # the same at each place
        near = call(qkv.clone(), max_seqlen=20)[0, :, :, 0]
        far = call(qkv.clone(), seqlen_offset=9, max_seqlen=20)[0, :, :, 0]
        scores = near[:, 0] @ near[:, 1].T
        torch.testing.assert_close(scores, far[:, 0] @ far[:, 1].T)
        torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
        assert not torch.allclose(scores[1, 0], scores[0, 0])

    def test_far_places_of_a_module_in_bfloat16(self):
        q = make((1, 1, 2, 8))[0].bfloat16()
        kv = torch.zeros(1, 1, 2, 2, 8).bfloat16()
        exact = rotary.RotaryEmbedding(8)
        call = rotary.RotaryEmbedding(8).bfloat16()
        want, _ = exact(q.clone(), kv.clone(), seqlen_offset=5000)
        got, _ = call(q.clone(), kv.clone(), seqlen_offset=5000)
        assert torch.equal(got, want)

    @pytest.mark.parametrize("scale_base", [None, 16])
    def test_rows_in_bfloat16_are_rounded_once(self, scale_base):
        qkv = make((2, 5, 3, 2, 8))[0].bfloat16()
        want = rotary.RotaryEmbedding(8, scale_base=scale_base)(qkv.float())
        assert torch.equal(rotary.RotaryEmbedding(8, scale_base=scale_base)(qkv.clone()), want.bfloat16())

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="^dim: got 7, want an even number from 2 on"):
            rotary.RotaryEmbedding(7)
        (qkv,) = make((2, 5, 3, 2, 8))
        with pytest.raises(ValueError, match="^max_seqlen: got None, want the longest sequence"):
            rotary.RotaryEmbedding(8)(qkv, seqlen_offset=torch.tensor([0, 1]))
