"""Calls of fulgur.torch.attention around PyTorch's dispatcher, and what has to see the operator instead."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch._dynamo import compiled_autograd  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_inputs import each_option, inputs, make, make_qkv  # noqa: E402

import fulgur.torch  # noqa: E402
from fulgur.torch import _direct, attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def computed(monkeypatch):
    """Whether the calls since were computed around the dispatcher, in their order."""
    found = []

    def spy_on(function):
        def spy(*arguments):
            results = function(*arguments)
            found.append(results is not None)
            return results

        return spy

    monkeypatch.setattr(_direct, "attention", spy_on(_direct.attention))
    return found


@each_option
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
def test_the_same_bits_as_the_operator(options, grad, computed):
    q, k, v = inputs(options, grad=grad)
    direct = attention(q, k, v, return_lse=True, **options)
    alone = attention(q, k, v, **options)
    assert computed[-1]
    with DispatchMode():
        dispatched = attention(q, k, v, return_lse=True, **options)
    assert not computed[-1]
    assert all(map(torch.equal, direct, dispatched))
    assert torch.equal(alone, direct[0]) and alone.requires_grad == grad
    assert all(x.is_contiguous() and x.dtype == y.dtype for x, y in zip((alone, *direct), (alone, *dispatched)))
    if grad:
        dout = torch.randn_like(alone)
        gradients = (torch.autograd.grad(out, (q, k, v), dout) for out in (alone, direct[0], dispatched[0]))
        for first, *others in zip(*gradients):
            assert all(torch.equal(first, x) for x in others)


@pytest.mark.parametrize(
    "option",
    [
        {"scale": np.float64(0.5)}, {"softcap": torch.tensor(2.0)}, {"chunk": np.int64(4)}, {"window": [3, 1]},
        {"causal": 1}, {"dropout_p": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_few_callers_give_goes_by_the_operator(option, computed):
    q, k, v = make_qkv()
    out = attention(q, k, v, **option)
    assert computed == [False] and out.shape == (2, 7, 4, 16)
    ((name, value),) = option.items()
    if name != "dropout_p":
        plain = {"window": tuple, "causal": bool, "chunk": int}.get(name, float)(value)
        assert torch.equal(attention(q, k, v, **{name: plain}), out) and computed == [False, True]


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_checkpoint_may_end_with_the_call(return_lse, computed):
    q, k, v = make_qkv(grad=True)
    sinks = torch.randn(4, requires_grad=True)
    call = lambda q, k, v: attention(q, k, v, sinks=sinks, return_lse=return_lse)  # noqa: E731

    def gradients(results):
        out = sum(x.sum() for x in results) if return_lse else results.sum()
        return torch.autograd.grad(out, (q, k, v, sinks))

    want, got = gradients(call(q, k, v)), gradients(checkpoint(call, q, k, v, use_reentrant=False))
    assert all(map(torch.equal, want, got)) and all(computed)


def test_what_a_hook_of_saved_tensors_throws_is_thrown(computed):
    def pack(x):
        raise KeyError("packed")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), pytest.raises(KeyError, match="packed"):
        attention(*make_qkv(grad=True))
    assert computed == []


def test_options_that_are_none_are_not_given(computed):
    q, k, v = make_qkv()
    out = attention(q, k, v, window=None, scale=None, sinks=None, page_table=None)
    assert torch.equal(out, attention(q, k, v)) and computed == [True, True]


@pytest.mark.parametrize("name", ["window_left", "window_right", "rng_state", "threads", "out", "dout", "no_such"])
def test_arguments_of_others_are_refused(name, computed):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        attention(*make_qkv(), **{name: 1})
    assert computed == [False]


def test_caches_and_tree_masks(computed):
    q, k, v = make_qkv()
    pages = {"page_table": torch.tensor([[1], [0]], dtype=torch.int32),
             "seqused_k": torch.tensor([9, 8], dtype=torch.int32)}  # fmt: skip
    tree = {"tree_mask": torch.randint(1, 128, (2, 7)), "causal": True}
    for options in pages, tree:
        out = attention(q, k, v, return_lse=True, **options)
        with DispatchMode():
            want = attention(q, k, v, return_lse=True, **options)
        assert all(map(torch.equal, out, want))
        with pytest.raises(ValueError, match="k: requires grad"):
            attention(q, k.clone().requires_grad_(), v, **options)
    assert computed == [True, False, False] * 2


def test_parameters_and_inference_mode(computed):
    q, k, v = make_qkv()
    want = attention(q, k, v)
    q = torch.nn.Parameter(q)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v), want)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), want)
    assert computed == [True] * 3


MODES = {
    "dispatch mode": DispatchMode,
    "function mode": FunctionMode,
    "default device": lambda: torch.device("cpu"),
    "counter of flops": lambda: FlopCounterMode(display=False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "profiler of autograd": torch.autograd.profiler.profile,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
def test_modes_see_the_operator(mode, grad, computed):
    q, k, v = make_qkv(grad=grad)
    with mode():
        attention(q, k, v)
    assert not any(computed)
    attention(q, k, v)
    assert computed[-1]


def test_profiler_shows_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(*make_qkv())
    assert "fulgur::forward" in {event.key for event in profile.key_averages()}


def plain(q, k, v):
    return attention(q, k, v)


TRANSFORMS = {
    "vmap": torch.vmap(lambda *x: plain(*(y[None] for y in x))),
    "functionalize": torch.func.functionalize(plain),
    "make_fx": make_fx(plain),
    "make_fx before dispatch": make_fx(plain, pre_dispatch=True),
    "make_fx of symbols": make_fx(plain, tracing_mode="symbolic"),
    "jit.trace": lambda *x: torch.jit.trace(plain, x, check_trace=False),
    "compile": torch.compile(plain, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("transformed", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_see_the_operator(transformed, computed):
    transformed(*make_qkv())
    assert not any(computed)


def test_graphs_have_the_operator():
    graph = make_fx(plain)(*make_qkv()).graph
    assert torch.ops.fulgur.forward.default in {node.target for node in graph.nodes}


@pytest.mark.parametrize("name", ["q", "k", "v", "alibi_slopes"])
@pytest.mark.parametrize("kind", ["subclass", "negated"])
def test_tensors_that_are_not_what_their_memory_says(kind, name, computed):
    tensors = dict(zip("qkv", make_qkv()), alibi_slopes=torch.rand(4))
    want = attention(**tensors)
    x = tensors[name]
    tensors[name] = x.as_subclass(Subclass) if kind == "subclass" else torch.complex(x, -x).conj().imag
    out = attention(**tensors)
    assert torch.equal(out, want) and computed == [True, False]
    assert type(out) is (Subclass if kind == "subclass" and name != "alibi_slopes" else type(out))


def test_negated_views_of_one_column(computed):
    """Whose strides do not tell that they are views of complex numbers."""
    q, k, v = make((2, 7, 1, 1), (2, 9, 1, 1), (2, 9, 1, 1))
    slopes = torch.rand(1)
    want = attention(q, k, v, alibi_slopes=slopes)
    negated = [torch.complex(x, -x).conj().imag for x in (q, k, v, slopes)]
    assert torch.equal(attention(*negated[:3], alibi_slopes=negated[3]), want) and computed == [True, False]


def test_fake_tensors(computed):
    with FakeTensorMode() as mode:
        q, k, v = make_qkv()
        assert attention(q, k, v).shape == (2, 7, 4, 16)
    out = attention(*(mode.from_tensor(x) for x in make_qkv()))
    assert out.shape == (2, 7, 4, 16) and not any(computed)


def test_rows_that_are_not_in_one_piece(computed):
    q, k, v = make_qkv()
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert turned.stride(-1) != 1
    assert torch.equal(attention(turned, k, v), attention(q, k, v)) and computed == [False, True]


def test_layouts_of_q(computed):
    """out is contiguous whatever the strides of q are."""
    q, k, v = make((2, 4, 7, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out = attention(q.transpose(1, 2), k, v)
    assert out.is_contiguous() and torch.equal(out, attention(q.transpose(1, 2).contiguous(), k, v))
    assert computed == [True, True]


def test_wrong_calls_get_the_error_of_the_operator(computed):
    q, k, v = make_qkv()
    with pytest.raises(RuntimeError, match="^k: got"):
        attention(q, k[..., :4], v)
    assert computed == [False]


# What autograd keeps of a recorded call, with the functions of Python and with those compiled for this PyTorch.


def test_compiled_where_it_is_wanted():
    assert fulgur.torch.compiled == (os.environ.get("FULGUR_TORCH_BUILD") == "1")


@pytest.mark.slow
def test_what_does_not_compile_is_an_error(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fPIC*) exit 1 ;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"FULGUR_TORCH_BUILD": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-c", "import fulgur.torch"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "rror building extension 'fulgur_native_" in done.stderr


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "lse"])
def test_hooks_see_what_is_saved(with_lse, computed):
    q, k, v = make_qkv(grad=True)
    packed, unpacked = [], []

    def pack(x):
        packed.append(x)
        return x

    def unpack(x):
        unpacked.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attention(q, k, v, seqused_k=torch.tensor([9, 5], dtype=torch.int32), return_lse=with_lse)
    assert computed == [True] and len(packed) == 6  # q, k, v, out, lse and seqused_k
    (out[0] if with_lse else out).sum().backward()
    assert len(unpacked) == 6


def test_tensors_changed_since_are_an_error(computed):
    for changed in "q", "k", "v", "out":
        tensors = dict(zip("qkv", make_qkv(grad=True)))
        tensors["out"] = attention(**tensors)
        with torch.no_grad():
            tensors[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            tensors["out"].sum().backward()
    assert all(computed)


def test_buffers_are_freed_and_kept(computed):
    q, k, v = make_qkv(grad=True)
    out = attention(q, k, v)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), (q, k, v))))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), (q, k, v))
    assert computed == [True]


def test_gradients_that_are_not_wanted(computed):
    """Of inputs that need none, and of a result that nothing uses."""
    q, k, v = make_qkv()
    k.requires_grad_()
    out, lse = attention(q, k, v, return_lse=True)
    (dk,) = torch.autograd.grad(lse.sum(), k, retain_graph=True)
    (both,) = torch.autograd.grad(out.sum() + lse.sum(), k, retain_graph=True)
    (of_out,) = torch.autograd.grad(out.sum(), k)
    assert torch.allclose(dk + of_out, both, atol=1e-6) and q.grad is None and computed == [True]


def test_numbers_and_tensors_reach_the_gradients(computed):
    """Options of each kind, and tensors with a gradient and without one, against the operator."""
    q, k, v = make_qkv(grad=True)
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4)
    options = {"scale": 0.3, "softcap": 4, "window": (5, 2), "top_left": True, "sinks": sinks, "alibi_slopes": slopes}
    gradients = []
    for mode in None, DispatchMode():
        if mode is None:
            out = attention(q, k, v, **options)
        else:
            with mode:
                out = attention(q, k, v, **options)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v, sinks)))
    assert all(map(torch.equal, *gradients)) and computed == [True, False]


@pytest.mark.slow
def test_compiled_autograd(computed):
    q, k, v = make_qkv(grad=True)
    wanted = torch.autograd.grad(attention(q, k, v, scale=0.3).square().sum(), (q, k, v))
    with compiled_autograd._enable(torch.compile(backend="eager")):
        attention(q, k, v, scale=0.3).square().sum().backward()
    assert all(map(torch.equal, wanted, (q.grad, k.grad, v.grad))) and computed == [True, True]


def test_errors_of_gradients_keep_their_kind(computed):
    q, k, v = make_qkv(grad=True)
    out = attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        dq.sum().backward()
    assert computed == [True]
