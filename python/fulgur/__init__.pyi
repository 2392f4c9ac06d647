from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

__all__ = [
    "BackwardPlan",
    "Engine",
    "Error",
    "Plan",
    "WorkspaceNeed",
    "__version__",
    "append",
    "attention",
    "attention_backward",
    "engines",
    "explain",
    "install_as",
    "merge",
    "plan",
    "plan_backward",
]

__version__: str

class Error(RuntimeError): ...

class Engine(NamedTuple):
    name: str
    description: str
    unavailable: str

class WorkspaceNeed(NamedTuple):
    bytes: int
    alignment: int
    zeroed_bytes: int

class _DLPack(Protocol):
    """NumPy arrays, torch tensors and every other array with ``__dlpack__``."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class _CudaStream(Protocol):
    """The handle of a stream as second of the two numbers."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

_Array = TypeVar("_Array", bound=_DLPack)
_ReturnLse = TypeVar("_ReturnLse", Literal[True], Literal[False])
_Shape = tuple[int, ...] | list[int]
_DType = Literal["f32", "bf16", "f16", "f64"]

@overload
def attention(
    q: _Array,
    k: _DLPack,
    v: _DLPack,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[False] = False,
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> _Array: ...
@overload
def attention(
    q: _Array,
    k: _DLPack,
    v: _DLPack,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[True],
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
def attention_backward(
    dout: _DLPack,
    q: _Array,
    k: _DLPack,
    v: _DLPack,
    out: _DLPack,
    lse: _DLPack,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array, _Array]: ...
@overload
def plan(
    q: _DLPack | _Shape,
    k: _DLPack | _Shape,
    v: _DLPack | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[False] = False,
    out: _DLPack | None = None,
) -> Plan[Literal[False]]: ...
@overload
def plan(
    q: _DLPack | _Shape,
    k: _DLPack | _Shape,
    v: _DLPack | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[True],
    out: _DLPack | None = None,
) -> Plan[Literal[True]]: ...
def plan_backward(
    dout: _DLPack | _Shape,
    q: _DLPack | _Shape,
    k: _DLPack | _Shape,
    v: _DLPack | _Shape,
    out: _DLPack | _Shape,
    lse: _DLPack | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    dlse: _DLPack | _Shape | None = None,
    dq: _DLPack | None = None,
    dk: _DLPack | None = None,
    dv: _DLPack | None = None,
) -> BackwardPlan: ...

class _AnyPlan:
    def explain(self) -> str: ...
    def workspace(self) -> WorkspaceNeed: ...

class Plan(_AnyPlan, Generic[_ReturnLse]):
    @overload
    def run(
        self: Plan[Literal[False]],
        q: _Array,
        k: _DLPack,
        v: _DLPack,
        *,
        alibi_slopes: _DLPack | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        page_table: _DLPack | None = None,
        page_indptr: _DLPack | None = None,
        cache_batch_idx: _DLPack | None = None,
        leftpad_k: _DLPack | None = None,
        out: _Array | None = None,
        lse: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> _Array: ...
    @overload
    def run(
        self: Plan[Literal[True]],
        q: _Array,
        k: _DLPack,
        v: _DLPack,
        *,
        alibi_slopes: _DLPack | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        page_table: _DLPack | None = None,
        page_indptr: _DLPack | None = None,
        cache_batch_idx: _DLPack | None = None,
        leftpad_k: _DLPack | None = None,
        out: _Array | None = None,
        lse: _Array | None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array]: ...

class BackwardPlan(_AnyPlan):
    def run(
        self,
        dout: _DLPack,
        q: _Array,
        k: _DLPack,
        v: _DLPack,
        out: _DLPack,
        lse: _DLPack,
        *,
        alibi_slopes: _DLPack | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array, _Array]: ...

@overload
def append(
    k_cache: _DLPack,
    v_cache: _DLPack,
    k_new: _DLPack,
    v_new: _DLPack,
    cache_seqlens: _DLPack,
    *,
    cu_seqlens_k_new: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    cos: _DLPack | None = None,
    sin: _DLPack | None = None,
    interleaved: bool = False,
    rotary_seqlens: _DLPack | None = None,
    q: None = None,
    q_out: None = None,
    cu_seqlens_q: None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> None: ...
@overload
def append(
    k_cache: _DLPack,
    v_cache: _DLPack,
    k_new: _DLPack,
    v_new: _DLPack,
    cache_seqlens: _DLPack,
    *,
    cu_seqlens_k_new: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    cos: _DLPack,
    sin: _DLPack,
    interleaved: bool = False,
    rotary_seqlens: _DLPack | None = None,
    q: _Array,
    q_out: _Array | None = None,
    cu_seqlens_q: _DLPack | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> _Array: ...
def merge(
    outs: Iterable[_Array],
    lses: Iterable[_Array],
    *,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
def explain(
    q: _DLPack | _Shape,
    k: _DLPack | _Shape,
    v: _DLPack | _Shape,
    *,
    backward: bool = False,
    dtype: _DType = "f32",
    device: str = "cpu",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
) -> str: ...
def engines() -> list[Engine]: ...
def install_as(
    name: Literal["flash_attn", "flash_attn_interface", "flash_attn.cute"],
) -> Callable[[], None]: ...
