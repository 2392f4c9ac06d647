"""Every wrong argument raises the right exception, which names it, and writes nothing."""

import ctypes

import numpy as np
import pytest

import fulgur


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def int32(*values):
    return np.array(values, np.int32)


def call(**changes):
    """A right call, changed; q (2, 5, 4, 8), k and v (2, 7, 2, 8)."""
    arguments = dict(q=zeros(2, 5, 4, 8), k=zeros(2, 7, 2, 8), v=zeros(2, 7, 2, 8))
    return fulgur.attention(**{**arguments, **changes})


def call_packed(**changes):
    arguments = dict(
        q=zeros(5, 4, 8),
        k=zeros(7, 2, 8),
        v=zeros(7, 2, 8),
        cu_seqlens_q=int32(0, 2, 5),
        cu_seqlens_k=int32(0, 3, 7),
    )
    return fulgur.attention(**{**arguments, **changes})


def call_backward(**changes):
    arguments = dict(q=zeros(2, 5, 4, 8), k=zeros(2, 7, 2, 8), v=zeros(2, 7, 2, 8))
    arguments.update(dout=zeros(2, 5, 4, 8), out=zeros(2, 5, 4, 8), lse=zeros(2, 4, 5))
    return fulgur.attention_backward(**{**arguments, **changes})


def call_merge(**changes):
    arguments = dict(outs=[zeros(2, 5, 4, 8)] * 2, lses=[zeros(2, 4, 5)] * 2)
    return fulgur.merge(**{**arguments, **changes})


def call_explain(**changes):
    return fulgur.explain(**{**dict.fromkeys("qkv", (2, 5, 4, 8)), **changes})


def call_plan(**changes):
    return fulgur.plan(**{**dict.fromkeys("qkv", (2, 5, 4, 8)), **changes})


def call_plan_backward(**changes):
    shapes = dict.fromkeys(("dout", "q", "k", "v", "out"), (2, 5, 4, 8))
    return fulgur.plan_backward(**{**shapes, "lse": (2, 4, 5), **changes})


def call_run(**changes):
    arguments = dict(q=zeros(2, 5, 4, 8), k=zeros(2, 7, 2, 8), v=zeros(2, 7, 2, 8))
    return fulgur.plan(**arguments, return_lse=True).run(**{**arguments, **changes})


def call_run_extras(**changes):
    arguments = dict(
        q=zeros(5, 4, 8),
        k=zeros(7, 2, 8),
        v=zeros(7, 2, 8),
        cu_seqlens_q=int32(0, 2, 5),
        cu_seqlens_k=int32(0, 3, 7),
        seqused_q=int32(2, 3),
        seqused_k=int32(3, 3),
        alibi_slopes=zeros(4),
    )
    return fulgur.plan(**arguments).run(**{**arguments, **changes})


def call_run_backward(**changes):
    arguments = dict(q=zeros(2, 5, 4, 8), k=zeros(2, 7, 2, 8), v=zeros(2, 7, 2, 8))
    arguments.update(dout=zeros(2, 5, 4, 8), out=zeros(2, 5, 4, 8), lse=zeros(2, 4, 5))
    return fulgur.plan_backward(**arguments).run(**{**arguments, **changes})


def read_only(array):
    array.flags.writeable = False
    return array


def misaligned(array):
    return (
        np.frombuffer(b"\0" * (array.nbytes + 1), np.uint8)[1:]
        .view(array.dtype)
        .reshape(array.shape)
    )


@pytest.mark.parametrize(
    "good",
    [
        call,
        call_packed,
        call_backward,
        call_merge,
        call_explain,
        call_plan,
        call_plan_backward,
        call_run,
        call_run_extras,
        call_run_backward,
    ],
)
def test_the_unchanged_calls_are_right(good):
    good()


TYPE_ERRORS = [
    *((call, {name: value}) for name in ("q", "k", "v") for value in (None, [[1.0]], 3, "x")),
    *((call, {name: object()})
      for name in ("out", "alibi_slopes", "bias", "sinks", "seqused_q", "seqused_k", "tree_mask")),
    *((call_packed, {name: [0, 5]}) for name in ("cu_seqlens_q", "cu_seqlens_k")),
    *((call_backward, {name: 1.0}) for name in ("dout", "q", "k", "v", "out", "lse")),
    (call, dict(q=np.full((2, 5, 4, 8), None))),
    (call, dict(causal=1)),
    (call, dict(causal="yes")),
    (call, dict(return_lse=None)),
    (call, dict(window=5)),
    (call, dict(window=(1, 2, 3))),
    (call, dict(window=(1.5, 2))),
    (call, dict(chunk=None)),
    (call, dict(chunk=8.0)),
    (call, dict(scale="1")),
    (call, dict(softcap=None)),
    (call, dict(dropout_p=1j)),
    (call, dict(seed=1.5)),
    (call, dict(offset="0")),
    (call_packed, dict(max_seqlen_q=None)),
    (call_packed, dict(max_seqlen_k=2.0)),
    (call, dict(deterministic=0)),
    (call, dict(invariant=None)),
    (call, dict(max_workspace=1e9)),
    (call, dict(threads=2.0)),
    (call, dict(engine=None)),
    (call, dict(causl=True)),
    (call_merge, dict(outs=5)),
    (call_merge, dict(lses=None)),
    (call_merge, dict(outs=["a", "b"])),
    (call_explain, dict(backward=2)),
    (call_explain, dict(q=(2, 5, 4, 8.0))),
    *((call_plan, {name: value}) for name in ("q", "k", "v") for value in (None, 3, (2, 5, 4, "8"))),
    (call_plan, dict(out=(2, 5, 4, 8))),
    (call_plan, dict(return_lse=1)),
    (call_plan, dict(seed=1)),
    *((call_plan_backward, {name: None}) for name in ("dout", "out", "lse")),
    *((call_plan_backward, {name: 1}) for name in ("dq", "dk", "dv", "engine")),
    *((call_run, {name: [1.0]}) for name in ("q", "out", "lse", "alibi_slopes", "workspace")),
    (call_run, dict(q=(2, 5, 4, 8))),
    (call_run, dict(seed=0.5)),
    (call_run, dict(causal=True)),
    *((call_run_backward, {name: 1.0}) for name in ("dout", "v", "lse", "dq", "dv", "workspace")),
]

VALUE_ERRORS = [
    # ranks, shapes, dtypes, strides
    *((call, {name: zeros(5, 2, 8)}) for name in ("q", "k", "v")),
    *((call, {name: zeros(1, 2, 5, 2, 8)}) for name in ("q", "k", "v")),
    *((call, {name: np.float32(1)}) for name in ("q", "k", "v", "out", "alibi_slopes", "sinks")),
    *((call, {name: zeros(2, 7, 2, 8, dtype=np.int32)}) for name in ("q", "k", "v")),
    *((call, {name: zeros(2, 7, 2, 8, dtype=np.complex64)}) for name in ("q", "k", "v")),
    *((call, {name: zeros(2, 7, 2, 8, dtype=np.uint8)}) for name in ("q", "k", "v")),
    *((call, {name: zeros(2, 7, 2, 16)[..., ::2]}) for name in ("q", "k", "v")),
    *((call, {name: misaligned(zeros(2, 7, 2, 8))}) for name in ("k", "v")),
    *((call_packed, {name: zeros(2, 5, 4, 8)}) for name in ("q", "k", "v")),
    (call, dict(k=zeros(3, 7, 2, 8))),
    (call, dict(k=zeros(2, 7, 2, 9))),
    (call, dict(v=zeros(2, 6, 2, 8))),
    (call, dict(v=zeros(2, 7, 1, 8))),
    (call, dict(q=zeros(2, 5, 3, 8))),
    (call, dict(q=zeros(2, 5, 0, 8))),
    (call, dict(q=zeros(2, 5, 4, 577), k=zeros(2, 7, 2, 577))),
    (call, dict(v=zeros(2, 7, 2, 0))),
    (call, dict(v=zeros(2, 7, 2, 513))),
    (call, dict(out=zeros(2, 5, 4, 9))),
    (call, dict(out=zeros(2, 5, 4, 8, dtype=np.float64))),
    (call, dict(out=read_only(zeros(2, 5, 4, 8)))),
    (call, dict(out=np.lib.stride_tricks.as_strided(zeros(8), (2, 5, 4, 8), (0, 0, 0, 4)))),
    # options
    (call, dict(window=(-2, 0))),
    (call, dict(window=(0, -2), causal=True)),
    (call, dict(window=(2**63, 0))),
    (call, dict(chunk=-1)),
    (call, dict(chunk=2**63)),
    (call, dict(scale=float("nan"))),
    (call, dict(scale=float("inf"))),
    (call, dict(scale=10**400)),
    (call, dict(softcap=-1)),
    (call, dict(softcap=float("nan"))),
    (call, dict(alibi_slopes=zeros(3))),
    (call, dict(alibi_slopes=zeros(3, 4))),
    (call, dict(alibi_slopes=zeros(4, dtype=np.float64))),
    (call, dict(sinks=zeros(3))),
    (call, dict(sinks=zeros(1, 4))),
    (call, dict(sinks=zeros(4, dtype=np.float16))),
    (call, dict(sinks=zeros(8)[::2])),
    (call, dict(tree_mask=zeros(2, 6, dtype=np.int64))),
    (call, dict(tree_mask=zeros(10, dtype=np.int64))),
    (call, dict(tree_mask=zeros(2, 5, dtype=np.int32))),
    (call, dict(tree_mask=zeros(2, 9, dtype=np.int64)[:, :5])),
    (call, dict(tree_mask=zeros(1, 65, dtype=np.int64), q=zeros(1, 65, 4, 8), k=zeros(1, 7, 2, 8),
                v=zeros(1, 7, 2, 8))),
    (call_packed, dict(tree_mask=zeros(1, 5, dtype=np.int64))),
    (call, dict(dropout_p=1.0)),
    (call, dict(dropout_p=-0.1)),
    (call, dict(dropout_p=float("nan"))),
    (call, dict(seed=-1)),
    (call, dict(seed=2**64)),
    (call, dict(offset=-1)),
    (call, dict(rng_state=np.zeros(3, np.int64))),
    (call, dict(rng_state=int32(1, 2))),
    (call, dict(rng_state=np.zeros(2, np.int64), offset=1)),
    (call, dict(seqused_q=int32(5))),
    (call, dict(seqused_q=int32(6, 5))),
    (call, dict(seqused_q=int32(5, -1))),
    (call, dict(seqused_q=np.array([5, 5]))),
    (call, dict(seqused_k=int32(7))),
    (call, dict(seqused_k=int32(7, 8))),
    (call, dict(seqused_k=int32(7, -1))),
    (call, dict(seqused_k=np.array([7, 7]))),
    (call, dict(max_seqlen_q=5)),
    (call, dict(max_workspace=-1)),
    (call, dict(max_workspace=2**63)),
    (call, dict(max_workspace=1)),
    (call, dict(threads=-1)),
    (call, dict(threads=2**40)),
    (call, dict(engine="abacus")),
    # packed
    (call_packed, dict(cu_seqlens_q=None)),
    (call_packed, dict(cu_seqlens_k=None)),
    (call_packed, dict(cu_seqlens_k=int32(0, 7))),
    (call_packed, dict(cu_seqlens_q=zeros(2, 2, dtype=np.int32))),
    (call_packed, dict(cu_seqlens_q=int32(-1, 2, 5))),
    (call_packed, dict(cu_seqlens_q=int32(0, 4, 3))),
    (call_packed, dict(cu_seqlens_k=int32(0, 3, 8))),
    (call_packed, dict(cu_seqlens_k=np.array([0, 3, 7]))),
    (call_packed, dict(max_seqlen_q=2)),
    (call_packed, dict(max_seqlen_k=-1)),
    (call_packed, dict(seqused_q=int32(3, 3))),
    (call_packed, dict(seqused_k=int32(4, 4))),
    # backward
    (call_backward, dict(dout=zeros(2, 5, 4, 9))),
    (call_backward, dict(out=zeros(2, 5, 2, 8))),
    (call_backward, dict(lse=zeros(2, 5, 4))),
    (call_backward, dict(lse=zeros(2, 4, 5, dtype=np.float64))),
    (call_backward, dict(dlse=zeros(2, 5, 4))),
    (call_backward, dict(dlse=zeros(2, 4, 5, dtype=np.float64))),
    (call_backward, dict(dout=zeros(2, 5, 4, 8, dtype=np.float16))),
    (call_backward, dict(max_workspace=1)),
    (call_backward, dict(dsinks=zeros(4))),
    (call_backward, dict(sinks=zeros(5))),
    (call_backward, dict(dsinks=zeros(5), sinks=zeros(4))),
    (call_backward, dict(dsinks=zeros(4, dtype=np.float64), sinks=zeros(4))),
    (call_backward, dict(dsinks=read_only(zeros(4)), sinks=zeros(4))),
    (call_backward, dict(dbias=zeros(1, 1, 1, 7))),
    (call_backward, dict(dbias=zeros(1, 1, 1, 6), bias=zeros(1, 1, 1, 7))),
    (call_backward, dict(dbias=zeros(1, 1, 1, 7, dtype=np.float16), bias=zeros(1, 1, 1, 7))),
    (call_backward, dict(dbias=zeros(1, 1, 1, 7), bias=zeros(1, 1, 1, 7, dtype=bool))),
    (call_backward, dict(dbias=read_only(zeros(1, 1, 1, 7)), bias=zeros(1, 1, 1, 7))),
    # merge
    (call_merge, dict(outs=[], lses=[])),
    (call_merge, dict(lses=[zeros(2, 4, 5)])),
    # explain
    (call_explain, dict(dtype="int8")),
    (call_explain, dict(q=(2, 5, 4, 600), k=(2, 5, 4, 600))),
    (call_explain, dict(q=(2, -5, 4, 8))),
    (call_explain, dict(k=())),
    (call_explain, dict(max_workspace=1)),
    # plans
    (call_plan, dict(dtype="int8")),
    (call_plan, dict(k=(2, 5, 4, 9))),
    (call_plan, dict(v=())),
    (call_plan, dict(out=zeros(2, 5, 4, 9))),
    (call_plan, dict(out=read_only(zeros(2, 5, 4, 8)))),
    (call_plan, dict(seqused_q=int32(5))),
    (call_plan, dict(seqused_k=int32(5))),
    (call_plan, dict(engine="abacus")),
    (call_plan_backward, dict(dout=(2, 5, 4, 9))),
    (call_plan_backward, dict(lse=(2, 5, 4))),
    (call_plan_backward, dict(max_workspace=1)),
    (call_plan_backward, dict(lse=zeros(2, 4, 5, dtype=np.float64))),
    (call_plan_backward, dict(dv=zeros(2, 5, 4, 9))),
    (call_plan_backward, dict(dsinks=zeros(4))),
    (call_plan_backward, dict(dbias=zeros(1, 1, 1, 7))),
    # runs that are not as planned
    (call_run, dict(q=zeros(1, 5, 4, 8))),
    (call_run, dict(k=zeros(2, 7, 2, 8, dtype=np.float16))),
    (call_run, dict(v=zeros(2, 7, 4, 8)[:, :, ::2])),
    (call_run, dict(v=misaligned(zeros(2, 7, 2, 8)))),
    (call_run, dict(out=zeros(2, 5, 4, 9))),
    (call_run, dict(out=read_only(zeros(2, 5, 4, 8)))),
    (call_run, dict(lse=zeros(2, 5, 4))),
    (call_run, dict(alibi_slopes=zeros(4))),
    (call_run, dict(sinks=zeros(4))),
    (call_run, dict(tree_mask=zeros(2, 5, dtype=np.int64))),
    (call_run, dict(seqused_q=int32(5, 5))),
    (call_run, dict(seqused_k=int32(7, 7))),
    (call_run, dict(cu_seqlens_q=int32(0, 5))),
    (call_run, dict(seed=-1)),
    (call_run, dict(offset=2**64)),
    (call_run_extras, dict(cu_seqlens_q=None)),
    (call_run_extras, dict(cu_seqlens_q=int32(0, 1, 5))),
    (call_run_extras, dict(cu_seqlens_q=int32(0, 3, 6))),
    (call_run_extras, dict(cu_seqlens_k=int32(-1, 3, 7))),
    (call_run_extras, dict(cu_seqlens_k=int32(0, 7))),
    (call_run_extras, dict(seqused_q=int32(2, 4))),
    (call_run_extras, dict(seqused_k=int32(4, 3))),
    (call_run_extras, dict(alibi_slopes=zeros(2, 4))),
    (call_run_backward, dict(dout=zeros(2, 5, 4, 9))),
    (call_run_backward, dict(lse=zeros(2, 4, 6))),
    (call_run_backward, dict(dk=zeros(2, 7, 2, 9))),
    (call_run_backward, dict(dv=read_only(zeros(2, 7, 2, 8)))),
]


def name_of(case):
    function, changes = case
    return f"{function.__name__}-{'-'.join(changes)}"


@pytest.mark.parametrize("case", TYPE_ERRORS, ids=name_of)
def test_wrong_kinds(case):
    function, changes = case
    with pytest.raises(TypeError, match=rf"\b{next(iter(changes))}\b"):
        function(**changes)


@pytest.mark.parametrize("case", VALUE_ERRORS, ids=name_of)
def test_wrong_values(case):
    function, changes = case
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}\b.*: "):
        function(**changes)


def test_merge_names_the_part():
    good, lse = zeros(2, 5, 4, 8), zeros(2, 4, 5)
    with pytest.raises(ValueError, match=r"^outs?: "):
        fulgur.merge([zeros(2, 5)], [lse])
    with pytest.raises(ValueError, match=r"^outs?: got i32"):
        fulgur.merge([good.astype(np.int32)], [lse])
    with pytest.raises(ValueError, match=r"^lses?: got i32"):
        fulgur.merge([good], [lse.astype(np.int32)])
    with pytest.raises(ValueError, match=r"^outs\[1\]: "):
        fulgur.merge([good, zeros(2, 5, 4, 9)], [lse, lse])
    with pytest.raises(ValueError, match=r"^lses\[1\]: "):
        fulgur.merge([good, good], [lse, zeros(2, 5, 4)])


def test_engine_failures_are_fulgur_errors():
    assert issubclass(fulgur.Error, RuntimeError) and not issubclass(fulgur.Error, ValueError)
    with pytest.raises(fulgur.Error, match="f64"):
        fulgur.attention(*[zeros(1, 4, 1, 8, dtype=np.float64)] * 3, engine="cpu")


def test_a_failing_call_writes_nothing():
    out = np.full((2, 5, 4, 8), 7, np.float32)
    for changes in (dict(scale=float("nan")), dict(k=zeros(2, 7, 3, 8)), dict(engine="abacus")):
        with pytest.raises(ValueError):
            call(out=out, **changes)
    assert (out == 7).all()


def test_out_may_not_be_an_input():
    q = zeros(2, 5, 4, 8)
    with pytest.raises(ValueError, match="^out: .*q"):
        call(q=q, out=q)


def test_the_reason_of_a_producer_is_told():
    with pytest.raises(TypeError, match="^q: .*byte order"):
        call(q=zeros(2, 5, 4, 8).astype(">f4"))


class Capsule:
    """A DLPack tensor of a device: nobody reads its memory."""

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device", ctypes.c_int32 * 2),
            ("ndim", ctypes.c_int32),
            ("dtype", ctypes.c_uint8 * 4),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.c_void_p),
            ("byte_offset", ctypes.c_uint64),
            ("manager", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        ]

    def __init__(self, device, shape):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        f32 = (ctypes.c_uint8 * 4)(2, 32, 1, 0)
        where = (ctypes.c_int32 * 2)(*device)
        self.tensor = self.Tensor(4096, where, len(shape), f32, self.shape, None, 0, None, None)

    def __dlpack_device__(self):
        return tuple(self.tensor.device)

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("function", [call_plan, call_explain])
def test_arrays_on_several_devices(function):
    array = Capsule((2, 1), (2, 5, 4, 8))
    with pytest.raises(ValueError, match="^k: .*cpu.*cuda:1"):
        function(q=array)


def test_arrays_on_other_devices():
    with pytest.raises(ValueError, match="^q: .*device"):
        call(q=Capsule((8, 0), (2, 5, 4, 8)))


def test_sizes_beyond_the_address_space():
    shape = (2**31, 2**31, 1, 1)
    with pytest.raises(ValueError, match=r"^q: .*2\^47"):
        fulgur.explain(shape, shape, shape)
