from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

__all__ = [
    "Engine",
    "Error",
    "__version__",
    "attention",
    "attention_backward",
    "engines",
    "explain",
    "merge",
]

__version__: str

class Error(RuntimeError): ...

class Engine(NamedTuple):
    name: str
    description: str
    unavailable: str

class _DLPack(Protocol):
    """NumPy arrays, torch tensors and every other array with ``__dlpack__``."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Array = TypeVar("_Array", bound=_DLPack)

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
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[False] = False,
    out: _Array | None = None,
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
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
    return_lse: Literal[True],
    out: _Array | None = None,
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
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
) -> tuple[_Array, _Array, _Array]: ...
def merge(outs: Iterable[_Array], lses: Iterable[_Array]) -> tuple[_Array, _Array]: ...
def explain(
    q: _DLPack | tuple[int, ...],
    k: _DLPack | tuple[int, ...],
    v: _DLPack | tuple[int, ...],
    *,
    backward: bool = False,
    dtype: Literal["f32", "bf16", "f16", "f64"] = "f32",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    threads: int = 0,
    engine: str = "",
) -> str: ...
def engines() -> list[Engine]: ...
