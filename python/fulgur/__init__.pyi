from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

__all__ = [
    "BackwardPlan",
    "Engine",
    "Error",
    "Expression",
    "Plan",
    "Quantized",
    "WorkspaceNeed",
    "__version__",
    "append",
    "append_attention",
    "attention",
    "attention_backward",
    "bit",
    "clip",
    "cos",
    "engines",
    "erf",
    "exp",
    "exp2",
    "expand_blocks",
    "explain",
    "expression",
    "floor",
    "hadamard",
    "install_as",
    "log",
    "maximum",
    "merge",
    "minimum",
    "plan",
    "plan_backward",
    "power",
    "quantize",
    "rsqrt",
    "scores",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "t5_bucket",
    "tanh",
    "where",
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
_Stage = Literal["scaled", "softcap", "masked", "probabilities"]
_Indices = slice | Sequence[int] | _DLPack

class Expression:
    type: Literal["bool", "int", "float"]
    def astype(self, dtype: Any) -> Expression: ...
    def __add__(self, other: _Operand) -> Expression: ...
    def __radd__(self, other: _Operand) -> Expression: ...
    def __sub__(self, other: _Operand) -> Expression: ...
    def __rsub__(self, other: _Operand) -> Expression: ...
    def __mul__(self, other: _Operand) -> Expression: ...
    def __rmul__(self, other: _Operand) -> Expression: ...
    def __truediv__(self, other: _Operand) -> Expression: ...
    def __rtruediv__(self, other: _Operand) -> Expression: ...
    def __floordiv__(self, other: _Operand) -> Expression: ...
    def __rfloordiv__(self, other: _Operand) -> Expression: ...
    def __mod__(self, other: _Operand) -> Expression: ...
    def __rmod__(self, other: _Operand) -> Expression: ...
    def __pow__(self, other: _Operand) -> Expression: ...
    def __rpow__(self, other: _Operand) -> Expression: ...
    def __lshift__(self, other: _Operand) -> Expression: ...
    def __rlshift__(self, other: _Operand) -> Expression: ...
    def __rshift__(self, other: _Operand) -> Expression: ...
    def __rrshift__(self, other: _Operand) -> Expression: ...
    def __and__(self, other: _Operand) -> Expression: ...
    def __rand__(self, other: _Operand) -> Expression: ...
    def __or__(self, other: _Operand) -> Expression: ...
    def __ror__(self, other: _Operand) -> Expression: ...
    def __xor__(self, other: _Operand) -> Expression: ...
    def __rxor__(self, other: _Operand) -> Expression: ...
    def __eq__(self, other: _Operand) -> Expression: ...  # type: ignore[override]
    def __ne__(self, other: _Operand) -> Expression: ...  # type: ignore[override]
    def __lt__(self, other: _Operand) -> Expression: ...
    def __le__(self, other: _Operand) -> Expression: ...
    def __gt__(self, other: _Operand) -> Expression: ...
    def __ge__(self, other: _Operand) -> Expression: ...
    def __neg__(self) -> Expression: ...
    def __pos__(self) -> Expression: ...
    def __invert__(self) -> Expression: ...
    def __abs__(self) -> Expression: ...

_Operand = Expression | float
_Expression = str | Expression | Callable[..., Any]

class Quantized:
    format: str
    codes: Any
    scale: Any
    zero_point: Any
    mean: Any
    dtype: str
    rotated: bool
    shape: tuple[int, ...]
    def __init__(
        self,
        format: str,
        codes: _DLPack,
        scale: _DLPack | None = None,
        zero_point: _DLPack | None = None,
        *,
        mean: _DLPack | None = None,
        dtype: str = "f32",
        rotated: bool = False,
    ) -> None: ...
    def dequantize(
        self,
        dtype: _DType | None = None,
        *,
        threads: int = 0,
        stream: int | _CudaStream | None = None,
    ) -> Any: ...

class _AnyPlan:
    def explain(self, *, bias: _DLPack | None = None, tensors: Mapping[str, _DLPack] | None = None) -> str: ...
    def details(self) -> dict[str, Any]: ...
    def workspace(self) -> WorkspaceNeed: ...

class Plan(_AnyPlan, Generic[_ReturnLse]):
    @overload
    def run(
        self: Plan[Literal[False]],
        q: _Array,
        k: _DLPack | Quantized,
        v: _DLPack | Quantized,
        *,
        alibi_slopes: _DLPack | None = None,
        bias: _DLPack | None = None,
        sinks: _DLPack | None = None,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        page_table: _DLPack | None = None,
        page_indptr: _DLPack | None = None,
        cache_batch_idx: _DLPack | None = None,
        leftpad_k: _DLPack | None = None,
        tree_mask: _DLPack | None = None,
        prefix_groups: _DLPack | None = None,
        prefix_lens: _DLPack | None = None,
        q_descale: _DLPack | None = None,
        k_descale: _DLPack | None = None,
        v_descale: _DLPack | None = None,
        k_zero_point: _DLPack | None = None,
        v_zero_point: _DLPack | None = None,
        k_mean: _DLPack | None = None,
        out: _Array | None = None,
        lse: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> _Array:
        """Computes :func:`attention` of arrays of the shapes, strides and dtypes planned for.

        Args:
            lse: where to write; only where the plan has ``return_lse``.
            workspace: a writable contiguous array as :meth:`workspace` wants it, on the device that
                computes, for one run at a time; default the library's own memory.
            q, k, v, alibi_slopes, bias, sinks, tensors, seed, offset, rng_state, cu_seqlens_q,
                cu_seqlens_k, seqused_q, seqused_k, page_table, page_indptr, cache_batch_idx, leftpad_k,
                tree_mask, prefix_groups, prefix_lens, q_descale, k_descale, v_descale, k_zero_point,
                v_zero_point, k_mean, out, stream: as for :func:`attention`.

        Returns:
            out, fresh or the very one given; ``(out, lse)`` where the plan has ``return_lse``.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
    @overload
    def run(
        self: Plan[Literal[True]],
        q: _Array,
        k: _DLPack | Quantized,
        v: _DLPack | Quantized,
        *,
        alibi_slopes: _DLPack | None = None,
        bias: _DLPack | None = None,
        sinks: _DLPack | None = None,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        page_table: _DLPack | None = None,
        page_indptr: _DLPack | None = None,
        cache_batch_idx: _DLPack | None = None,
        leftpad_k: _DLPack | None = None,
        tree_mask: _DLPack | None = None,
        prefix_groups: _DLPack | None = None,
        prefix_lens: _DLPack | None = None,
        q_descale: _DLPack | None = None,
        k_descale: _DLPack | None = None,
        v_descale: _DLPack | None = None,
        k_zero_point: _DLPack | None = None,
        v_zero_point: _DLPack | None = None,
        k_mean: _DLPack | None = None,
        out: _Array | None = None,
        lse: _Array | None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array]: ...

class BackwardPlan(_AnyPlan):
    @overload
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
        bias: _DLPack | None = None,
        sinks: None = None,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        dsinks: None = None,
        dbias: None = None,
        dtensors: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array, _Array]:
        """Computes :func:`attention_backward` of arrays of the shapes, strides and dtypes planned
        for.

        Args:
            workspace: a writable contiguous array as :meth:`workspace` wants it, on the device that
                computes, for one run at a time; default the library's own memory.
            dout, q, k, v, out, lse, alibi_slopes, bias, sinks, tensors, seed, offset, rng_state,
                cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, dlse, dq, dk, dv, dsinks, dbias, dtensors,
                stream: as for :func:`attention_backward`.

        Returns:
            (dq, dk, dv), after them dsinks with sinks, then dbias where it is given; each fresh or the
            very one given. With dtensors a dict of these is the last one.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
    @overload
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
        bias: _DLPack | None = None,
        sinks: _DLPack,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        dsinks: _Array | None = None,
        dbias: None = None,
        dtensors: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array, _Array, _Array]: ...
    @overload
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
        bias: _DLPack,
        sinks: None = None,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        dsinks: None = None,
        dbias: _Array,
        dtensors: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array, _Array, _Array]: ...
    @overload
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
        bias: _DLPack,
        sinks: _DLPack,
        tensors: Mapping[str, _DLPack] | None = None,
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        dsinks: _Array | None = None,
        dbias: _Array,
        dtensors: None = None,
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[_Array, _Array, _Array, _Array, _Array]: ...
    @overload
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
        bias: _DLPack | None = None,
        sinks: _DLPack | None = None,
        tensors: Mapping[str, _DLPack],
        seed: int = 0,
        offset: int = 0,
        rng_state: _DLPack | None = None,
        cu_seqlens_q: _DLPack | None = None,
        cu_seqlens_k: _DLPack | None = None,
        seqused_q: _DLPack | None = None,
        seqused_k: _DLPack | None = None,
        dlse: _DLPack | None = None,
        dq: _Array | None = None,
        dk: _Array | None = None,
        dv: _Array | None = None,
        dsinks: _Array | None = None,
        dbias: _Array | None = None,
        dtensors: Mapping[str, _DLPack | None],
        workspace: _DLPack | None = None,
        stream: int | _CudaStream | None = None,
    ) -> tuple[Any, ...]: ...

@overload
def attention(
    q: _Array,
    k: _DLPack | Quantized,
    v: _DLPack | Quantized,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[False] = False,
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> _Array:
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Scores are ``scale * q k^T``, then ``softcap * tanh(scores / softcap)``, then the ALiBi bias
    ``-slope * |i + sk - sq - j|``, then the mask, softmax, dropout. Masks are aligned bottom-right.
    A row that sees no key has out 0 and lse -inf, with a sink that of the sink.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 576.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is unbounded.
            With ``causal`` both hold.
        chunk: of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off (the local
            layers of Llama 4).
        top_left: query i is at key i instead of key i + sk - sq, for the mask and ALiBi: the first
            query is at the first key of its sequence. Not with ``tree_mask`` or rotary embeddings.
        scale: of the scores; default 1 / sqrt(d).
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``.
        bias: ``(batch, hq, sq, sk)``, each of them may be 1: float32, bfloat16, float16 (float64 where
            q is) added to the scores, after softcap and ALiBi, where -inf, or less than -2**115, hides
            the key; or bool, True where the query sees the key. Packed sequences and caches count
            queries and keys in each sequence, and may have a bias of more of both.
        sinks: float32 or the 16-bit dtype of q ``(hq,)``: a score of each head that joins the softmax
            of every row, without a value: lse is log(exp(sink) + sum of exp(scores)). Not scaled,
            capped or masked; -inf is none (attention sinks, as gpt-oss learns them; StreamingLLM, arXiv
            2309.17453).
        score_mod: what becomes of each score, after softcap and ALiBi and before the bias: a text, as
            in docs/expressions.md, a function, or an :class:`Expression`. Parameters of a function are
            named after what it needs: of score, b (sequence), h (q head), hk (kv head), q, k (query and
            key of the sequence), sq, sk (its lengths), q0 (its first packed query), delta (k - q - (sk
            - sq)), and of the tensors. On the CPU.
        mask_mod: likewise whether a query sees a key, of those that the other masks show; not of score.
        tensors: arrays that score_mod and mask_mod index, by name: float32, bfloat16, float16, float64,
            int32, int64 or bool, of 1 to 4 dimensions, any strides.
        dropout_p: 0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.
        seed, offset: of the dropout, 0 to 2^64 - 1.
        rng_state: int64 ``(2,)``: seed and offset as an array, read when the call computes; instead of
            both numbers.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``, rows around these are padding. Both or none,
            or ``cu_seqlens_q`` alone with a cache, whose k and v have four dimensions.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens, in host
            memory only. With a page_table max_seqlen_k bounds seqused_k; 0 is what the table has room
            for.
        seqused_q: int32 ``(batch,)``: only the first ``seqused_q[b]`` queries of sequence b exist: the
            rows after are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        page_table: int32 ``(batch, max_pages)``: k is ``(pages, page, hk, d)``, v ``(pages, page, hk,
            dv)``, and key j of sequence b is row ``j % page`` of page ``page_table[b, j // page]``.
            seqused_k must be given.
        page_indptr: int32 ``(batch + 1,)``: page_table is ``(ids,)``, and the pages of sequence b are
            ``page_table[page_indptr[b]:page_indptr[b + 1]]``.
        cache_batch_idx: int32 ``(batch,)``: sequence b is row ``cache_batch_idx[b]`` of k and v.
        leftpad_k: int32 ``(batch,)``: the first ``leftpad_k[b]`` keys of sequence b do not exist.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: a word of bits for each
            query. The last sq keys of a sequence are the tokens of its queries, and bit j says whether
            a query sees the jth of them, where the mask shows it, too (drafts of speculative decoding).
            Earlier keys are as without it. It has no gradient.
        prefix_groups, prefix_lens: int32 ``(groups + 1,)`` and ``(groups,)``, with a page_table:
            sequences ``prefix_groups[g]`` to ``prefix_groups[g + 1] - 1`` have the same first
            ``prefix_lens[g]`` keys and values, all of them in front of the queries' own, which are read
            once, through the pages of the first sequence, where that pays. Both or none.
        q_descale, k_descale, v_descale: float32 or float16: what codes of q, k and v are multiplied by,
            default 1. ``(1,)``, ``(batch, hk)``, each of which may be 1, or the shape of q, k or v but
            for the last dimension: a number of groups of columns. On the CPU k and v may be float8,
            int8, or a :class:`Quantized`, which brings its own, or other floats than q; on GPUs they
            may be float8, int8 or int4 with a q of bf16, f16 or float8, whose descale then has one
            group.
        k_zero_point, v_zero_point: of int8 and int4, which is taken from the codes first, in the shape
            of the descale; default 0.
        k_mean: float32 ``(batch, hk, d)``, of which batch may be 1: what the rows of codes of k have
            besides, which lse says, too. Not with both softcap and alibi_slopes.
        hadamard: k holds codes of rows that :func:`hadamard` has rotated, and a q of floats is rotated
            likewise; a Quantized k says it itself.
        deterministic: the backward pass gives the same bits in every run.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        fast_codes: P V of float8_e4m3fn arrays in e4m3, too, on Hopper GPUs: faster, and off by what
            e4m3 rounds of P and of V less its mean.
        max_workspace: the bytes that the call may want besides its arrays at most; 0 is any number.
            Gradients on a GPU then take a slower form that fits; where none does, an error says the
            minimum.
        threads: 0 is OMP_NUM_THREADS or all cores.
        engine: "" picks; "cpu", "cuda" or "reference" (``fulgur.engines()``).
        algorithm: "" picks; "standard", "fa1", "fa2" or "fa3" forces one of the papers' algorithms, of
            an engine that has it (docs/algorithms.md).
        return_lse: return ``(out, lse)``.
        out: where to write, shape of q but for dv columns, dtype of q.
        stream: on CUDA, where to put the work; default the current stream of q's library. Lengths,
            prefix_groups and prefix_lens, alibi_slopes and sinks may lie on the CPU then.

    Returns:
        out, fresh or the very ``out`` given; with ``return_lse`` also lse: float32 (float64 where q
        is), ``(batch, hq, sq)`` or packed ``(hq, total_q)``, natural log.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 2, 4, 16), np.float32)
    >>> v = np.arange(1 * 2 * 4 * 1, dtype=np.float32).reshape(1, 2, 4, 1)
    >>> out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    >>> out[0, :, 0, 0]  # the first query sees the first key, the second one averages both
    array([0., 2.], dtype=float32)
    >>> np.exp(lse[0, 0]).round(3)
    array([1., 2.], dtype=float32)
    """
@overload
def attention(
    q: _Array,
    k: _DLPack | Quantized,
    v: _DLPack | Quantized,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[True],
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def attention(
    q: _Array,
    k: _DLPack | Quantized,
    v: _DLPack | Quantized,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: bool,
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> _Array | tuple[_Array, _Array]: ...
@overload
def append(
    k_cache: _DLPack | Quantized,
    v_cache: _DLPack | Quantized,
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
    chunk: int = 0,
    top_left: bool = False,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> None:
    """Writes new keys and values into caches, in place.

    Token i of sequence b goes to row ``cache_seqlens[b] + i`` of its cache. The call of
    :func:`attention` that follows takes ``cache_seqlens`` plus the new rows as ``seqused_k``, and
    reads what was stored, after rounding.

    Args:
        k_cache, v_cache: written in place: ``(batch, sk, hk, dim)`` or ``(pages, page, hk, dim)``, as
            :func:`attention` takes them. Rows that take no token keep their bits.
        k_new, v_new: ``(batch, s_new, hk, dim)``, or packed ``(total, hk, dim)`` with cu_seqlens_k_new;
            dtype of the caches.
        cache_seqlens: int32 ``(batch,)``: the old lengths, counted from the first row of each sequence,
            left padding included.
        cu_seqlens_k_new: int32 ``(batch + 1,)``: where the new rows of each sequence begin.
        cos, sin: ``(positions, rotary_dim / 2)``, dtype of the caches or float32: rotary position
            embedding of the first rotary_dim columns of new keys, computed in float32 (float64 for
            float64) and rounded once. Values are not rotated.
        interleaved: columns 2 i and 2 i + 1 are a pair, or else i and i + rotary_dim / 2.
        rotary_seqlens: int32 ``(batch,)``: the position of each sequence's first new token; default
            cache_seqlens.
        q: queries to rotate with, ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)`` with
            cu_seqlens_q. As FlashAttention has it, query i is rotated to the position of the first new
            token + i if ``causal``, ``window`` or ``chunk`` hides keys, else all to that of the first.
        q_out: where the rotated queries go; may be q itself.
        cu_seqlens_q: int32 ``(batch + 1,)``.
        page_table, page_indptr, cache_batch_idx, causal, window, chunk, top_left, threads, stream: as
            for :func:`attention`.

    Returns:
        The rotated queries, fresh or the very ``q_out`` given; None without q. Packed rows after
        the last sequence are not written.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: float64 arrays are on a GPU, or it cannot be used.

    >>> import numpy as np, fulgur
    >>> k_cache, v_cache = np.zeros((2, 3, 4, 1, 2), np.float32)  # 3 pages of 4 rows
    >>> new, lengths = np.ones((1, 2, 1, 2), np.float32), np.array([3], np.int32)
    >>> page_table = np.array([[2, 0]], np.int32)
    >>> fulgur.append(k_cache, v_cache, new, new, lengths, page_table=page_table)
    >>> k_cache[..., 0, 0]  # the last row of page 2, and the first of page 0
    array([[1., 0., 0., 0.],
           [0., 0., 0., 0.],
           [0., 0., 0., 1.]], dtype=float32)
    """
@overload
def append(
    k_cache: _DLPack | Quantized,
    v_cache: _DLPack | Quantized,
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
    chunk: int = 0,
    top_left: bool = False,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> _Array: ...
@overload
def append_attention(
    q: _Array,
    k_cache: _DLPack | Quantized,
    v_cache: _DLPack | Quantized,
    k_new: _DLPack,
    v_new: _DLPack,
    cache_seqlens: _DLPack,
    *,
    cu_seqlens_k_new: _DLPack | None = None,
    cos: _DLPack | None = None,
    sin: _DLPack | None = None,
    interleaved: bool = False,
    rotary_seqlens: _DLPack | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    cu_seqlens_q: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[False] = False,
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> _Array:
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Sequence b attends its ``cache_seqlens[b]`` rows and the new ones. With cos and sin the queries
    are rotated, too, and q keeps its values. On a GPU the kernel that attends appends few new rows
    itself, and lengths may change from replay to replay of a graph.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``.
        k_cache, v_cache: written in place: ``(batch, sk, hk, dim)`` or ``(pages, page, hk, dim)``, as
            :func:`attention` takes them. Rows that take no token keep their bits.
        k_new, v_new: ``(batch, s_new, hk, dim)``, or packed ``(total, hk, dim)`` with cu_seqlens_k_new;
            dtype of the caches.
        cache_seqlens: int32 ``(batch,)``: the old lengths, counted from the first row of each sequence,
            left padding included.
        cu_seqlens_k_new: int32 ``(batch + 1,)``: where the new rows of each sequence begin.
        cos, sin: ``(positions, rotary_dim / 2)``, dtype of the caches or float32: rotary position
            embedding of the first rotary_dim columns of new keys, computed in float32 (float64 for
            float64) and rounded once. Values are not rotated.
        interleaved: columns 2 i and 2 i + 1 are a pair, or else i and i + rotary_dim / 2.
        rotary_seqlens: int32 ``(batch,)``: the position of each sequence's first new token; default
            cache_seqlens.
        causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod, mask_mod,
            tensors, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_q, page_table, page_indptr,
            cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens, invariant, fast_codes,
            max_workspace, threads, engine, algorithm, return_lse, out, stream: as for
            :func:`attention`.

    Returns:
        As :func:`attention`.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 2), np.float32)
    >>> q, lengths = np.ones((1, 1, 1, 2), np.float32), np.array([3], np.int32)
    >>> out = fulgur.append_attention(q, k_cache, v_cache, 0 * q, 8 * q, lengths, causal=True)
    >>> out.ravel(), v_cache[0, :, 0, 0]  # three values of 0, and the new one
    (array([2., 2.], dtype=float32), array([0., 0., 0., 8.], dtype=float32))
    """
@overload
def append_attention(
    q: _Array,
    k_cache: _DLPack | Quantized,
    v_cache: _DLPack | Quantized,
    k_new: _DLPack,
    v_new: _DLPack,
    cache_seqlens: _DLPack,
    *,
    cu_seqlens_k_new: _DLPack | None = None,
    cos: _DLPack | None = None,
    sin: _DLPack | None = None,
    interleaved: bool = False,
    rotary_seqlens: _DLPack | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    cu_seqlens_q: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[True],
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
@overload
def append_attention(
    q: _Array,
    k_cache: _DLPack | Quantized,
    v_cache: _DLPack | Quantized,
    k_new: _DLPack,
    v_new: _DLPack,
    cache_seqlens: _DLPack,
    *,
    cu_seqlens_k_new: _DLPack | None = None,
    cos: _DLPack | None = None,
    sin: _DLPack | None = None,
    interleaved: bool = False,
    rotary_seqlens: _DLPack | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    cu_seqlens_q: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: bool,
    out: _Array | None = None,
    stream: int | _CudaStream | None = None,
) -> _Array | tuple[_Array, _Array]: ...
def scores(
    q: _Array,
    k: _DLPack | Quantized,
    *,
    stage: _Stage,
    rows: _Indices | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    threads: int = 0,
    engine: str = "",
) -> _Array:
    """The scores of attention, or its probabilities: what :func:`attention` makes and never keeps.

    To look at, to align words by, for interfaces that return them. Computed a row at a time, on the CPU in double
    precision, on a GPU in float32: it needs no memory but for its result, and is no fast path.

    Args:
        stage: "scaled" is ``scale * q k^T``, "softcap" what softcap makes of it, "masked" with ALiBi,
            the bias and the mask what the softmax takes, -inf where the query does not see the key, and
            "probabilities" what the softmax with the sinks gives, all 0 in a row that sees no key.
        rows: the queries of each sequence that are wanted: their numbers, or a slice of them; default
            all.
        q, k, causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod,
            mask_mod, tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q,
            seqused_k, page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, threads, engine:
            as for :func:`attention`.

    Returns:
        A fresh array, float32 (float64 where q is), ``(batch, hq, sq, sk)``, or with ``rows`` of so many queries.
        Packed sequences and caches have the sq and the sk of the longest one. Queries and keys count from the
        first one of their sequence that exists; scores of others are -inf and their probabilities 0.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: the arrays are of float64 on a GPU.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 3, 1, 4), np.float32)
    >>> fulgur.scores(q, k, stage="probabilities", causal=True)[0, 0].round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]], dtype=float32)
    >>> fulgur.scores(q, k, stage="masked", causal=True, rows=[1])[0, 0]
    array([[  0.,   0., -inf]], dtype=float32)
    """
@overload
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
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    dsinks: None = None,
    dbias: None = None,
    dtensors: None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array, _Array]:
    """The gradients of attention to q, k and v, to the sinks, if there are any, and to the bias.

    Args:
        dout: the gradient of out, shape and dtype of out.
        q, k, v: as given to :func:`attention`.
        out, lse: as :func:`attention` returned them with ``return_lse=True``.
        dlse: the gradient of lse, shape and dtype of lse; default 0.
        dq, dk, dv: where to write, with the shapes and the dtype of q, k and v.
        dsinks: float32 or the 16-bit dtype of q ``(hq,)``: where to write; with sinks alone.
        dbias: the shape of bias, float32 or its dtype: where to write the gradient of the bias, which
            is computed where this is given; dimensions of 1 are summed over, and strides may be any.
        dtensors: which of the tensors of floats get their gradient: arrays to write it to by name, in
            the shape of the tensor, float32 or its dtype, or None for a fresh one.
        causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod, mask_mod,
            tensors, dropout_p, seed, offset, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, seqused_q, seqused_k, deterministic, invariant, fast_codes, max_workspace,
            threads, engine, algorithm, stream: as for :func:`attention`.

    Returns:
        (dq, dk, dv), after them dsinks with sinks, then dbias where it is given; each fresh or the
        very one given. With dtensors a dict of these is the last one.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 2, 1, 8), np.float32)
    >>> v = np.array([1, 3], np.float32).reshape(1, 2, 1, 1)
    >>> out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = fulgur.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv.ravel()  # the first key counts in both rows
    array([1.5, 0.5], dtype=float32)
    """
@overload
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
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    dsinks: _Array | None = None,
    dbias: None = None,
    dtensors: None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array, _Array, _Array]: ...
@overload
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
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack,
    sinks: None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    dsinks: None = None,
    dbias: _Array,
    dtensors: None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array, _Array, _Array]: ...
@overload
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
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack,
    sinks: _DLPack,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    dsinks: _Array | None = None,
    dbias: _Array,
    dtensors: None = None,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array, _Array, _Array, _Array]: ...
@overload
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
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack],
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | None = None,
    dq: _Array | None = None,
    dk: _Array | None = None,
    dv: _Array | None = None,
    dsinks: _Array | None = None,
    dbias: _Array | None = None,
    dtensors: Mapping[str, _DLPack | None],
    stream: int | _CudaStream | None = None,
) -> tuple[Any, ...]: ...
@overload
def plan(
    q: _DLPack | Quantized | _Shape,
    k: _DLPack | Quantized | _Shape,
    v: _DLPack | Quantized | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    card: str = "",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[False] = False,
    out: _DLPack | None = None,
) -> Plan[Literal[False]]:
    """Every decision about one shape of :func:`attention`, made once, to be run many times.

    Args:
        q, k, v: arrays as for :func:`attention`, or only their shapes; nothing is computed. Their
            shapes, strides and dtypes are what is planned for.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        card: a GPU by its name, such as "a100" or "rtx-4090", which need not be here: what it would
            get, what it is expected to take and what binds. Arguments are shapes, device is cuda, and
            the plan runs nowhere.
        out: given if runs will give one with other strides than a fresh array has.
        causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod, mask_mod,
            tensors, dropout_p, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            seqused_q, seqused_k, page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask,
            prefix_groups, prefix_lens, q_descale, k_descale, v_descale, k_zero_point, v_zero_point,
            k_mean, hadamard, deterministic, invariant, fast_codes, max_workspace, threads, engine,
            algorithm, return_lse: as for :func:`attention`.

    Returns:
        A :class:`Plan`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> rows, kv = (6, 2, 8), np.ones((10, 2, 8), np.float32)
    >>> lengths = [np.array(x, np.int32) for x in ([0, 2, 6], [0, 5, 10])]
    >>> plan = fulgur.plan(rows, kv, kv, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
    >>> q = np.ones(rows, np.float32)
    >>> for ends in ([0, 2, 6], [0, 4, 5]):  # other lengths under one plan
    ...     lengths[0][:] = ends
    ...     out = plan.run(q, kv, kv, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
    >>> out[:, 0, 0]  # the last row is padding
    array([1., 1., 1., 1., 1., 0.], dtype=float32)
    """
@overload
def plan(
    q: _DLPack | Quantized | _Shape,
    k: _DLPack | Quantized | _Shape,
    v: _DLPack | Quantized | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    card: str = "",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    return_lse: Literal[True],
    out: _DLPack | None = None,
) -> Plan[Literal[True]]: ...
def plan_backward(
    dout: _DLPack | Quantized | _Shape,
    q: _DLPack | Quantized | _Shape,
    k: _DLPack | Quantized | _Shape,
    v: _DLPack | Quantized | _Shape,
    out: _DLPack | Quantized | _Shape,
    lse: _DLPack | Quantized | _Shape,
    *,
    dtype: _DType = "f32",
    device: str = "cpu",
    card: str = "",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
    dlse: _DLPack | _Shape | None = None,
    dq: _DLPack | None = None,
    dk: _DLPack | None = None,
    dv: _DLPack | None = None,
    dsinks: _DLPack | None = None,
    dbias: _DLPack | None = None,
    dtensors: Mapping[str, _DLPack | None] | None = None,
) -> BackwardPlan:
    """Every decision about one shape of :func:`attention_backward`, made once.

    Args:
        dout, q, k, v, out, lse: arrays as for :func:`attention_backward`, or only their shapes; nothing
            is computed. Their shapes, strides and dtypes are what is planned for.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        card: a GPU by its name, such as "a100" or "rtx-4090", which need not be here: what it would
            get, what it is expected to take and what binds. Arguments are shapes, device is cuda, and
            the plan runs nowhere.
        dlse: given, an array or its shape, if runs will give one.
        dq, dk, dv: given if runs will give ones with other strides than fresh arrays have.
        dsinks: float32 or the 16-bit dtype of q ``(hq,)``: likewise; with sinks alone.
        dbias: given if runs will give one.
        dtensors: given if runs will give ones.
        causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod, mask_mod,
            tensors, dropout_p, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            seqused_q, seqused_k, deterministic, invariant, fast_codes, max_workspace, threads, engine,
            algorithm: as for :func:`attention`.

    Returns:
        A :class:`BackwardPlan`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> x = np.ones((1, 4, 2, 8), np.float32)
    >>> plan = fulgur.plan(x, x, x, causal=True, return_lse=True)
    >>> backward = fulgur.plan_backward(*[x.shape] * 5, (1, 2, 4), causal=True)
    >>> out, lse = plan.run(x, x, x)
    >>> dq, dk, dv = backward.run(np.ones_like(out), x, x, x, out, lse)
    >>> dv[0, :, 0, 0].round(3)
    array([2.083, 1.083, 0.583, 0.25 ], dtype=float32)
    """
def explain(
    q: _DLPack | Quantized | _Shape,
    k: _DLPack | Quantized | _Shape,
    v: _DLPack | Quantized | _Shape,
    *,
    backward: bool = False,
    dtype: _DType = "f32",
    device: str = "cpu",
    card: str = "",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: _DLPack | None = None,
    bias: _DLPack | None = None,
    sinks: _DLPack | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, _DLPack] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    rng_state: _DLPack | None = None,
    cu_seqlens_q: _DLPack | None = None,
    cu_seqlens_k: _DLPack | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: _DLPack | None = None,
    seqused_k: _DLPack | None = None,
    page_table: _DLPack | None = None,
    page_indptr: _DLPack | None = None,
    cache_batch_idx: _DLPack | None = None,
    leftpad_k: _DLPack | None = None,
    tree_mask: _DLPack | None = None,
    prefix_groups: _DLPack | None = None,
    prefix_lens: _DLPack | None = None,
    q_descale: _DLPack | None = None,
    k_descale: _DLPack | None = None,
    v_descale: _DLPack | None = None,
    k_zero_point: _DLPack | None = None,
    v_zero_point: _DLPack | None = None,
    k_mean: _DLPack | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    threads: int = 0,
    engine: str = "",
    algorithm: str = "",
) -> str:
    """The plan of a call in words: engine, tiles, splits, bytes, flops, what was rejected and why.

    On the CPU also how long a call of these lengths is expected to take and what binds it. The
    first such call of a process measures the peaks of the machine, in some 10 to 40 ms. With
    ``mask_mod`` or a ``bias`` of bools also how many tiles that hides, shows in full, and in part.

    Args:
        q, k, v: arrays as for :func:`attention`, or only their shapes; nothing is computed. Their
            shapes, strides and dtypes are what is planned for.
        backward: the plan of :func:`attention_backward`.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        card: a GPU by its name, such as "a100" or "rtx-4090", which need not be here: what it would
            get, what it is expected to take and what binds. Arguments are shapes, device is cuda, and
            the plan runs nowhere.
        causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks, score_mod, mask_mod,
            tensors, dropout_p, seed, offset, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, seqused_q, seqused_k, page_table, page_indptr, cache_batch_idx, leftpad_k,
            tree_mask, prefix_groups, prefix_lens, q_descale, k_descale, v_descale, k_zero_point,
            v_zero_point, k_mean, hadamard, deterministic, invariant, fast_codes, max_workspace,
            threads, engine, algorithm: as for :func:`attention`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import fulgur
    >>> shape = (2, 4096, 8, 64)
    >>> "cpu" in fulgur.explain(shape, shape, shape, dtype="bf16", causal=True)
    True
    """
def expression(what: _Expression, *, tensors: Mapping[str, _DLPack] | None = None) -> Expression: ...
def bit(x: _Operand, i: _Operand) -> Expression: ...
def clip(x: _Operand, low: _Operand, high: _Operand) -> Expression: ...
def cos(x: _Operand) -> Expression: ...
def erf(x: _Operand) -> Expression: ...
def exp(x: _Operand) -> Expression: ...
def exp2(x: _Operand) -> Expression: ...
def floor(x: _Operand) -> Expression: ...
def log(x: _Operand) -> Expression: ...
def maximum(x: _Operand, y: _Operand) -> Expression: ...
def minimum(x: _Operand, y: _Operand) -> Expression: ...
def power(x: _Operand, y: _Operand) -> Expression: ...
def rsqrt(x: _Operand) -> Expression: ...
def sigmoid(x: _Operand) -> Expression: ...
def silu(x: _Operand) -> Expression: ...
def sin(x: _Operand) -> Expression: ...
def sqrt(x: _Operand) -> Expression: ...
def t5_bucket(delta: _Operand, buckets: _Operand, farthest: _Operand) -> Expression: ...
def tanh(x: _Operand) -> Expression: ...
def where(condition: _Operand, x: _Operand, y: _Operand) -> Expression: ...
def merge(
    outs: Iterable[_Array],
    lses: Iterable[_Array],
    *,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
def quantize(
    x: _DLPack,
    format: str,
    *,
    scale: Literal["tensor", "head", "token"] | int | _DLPack | None = None,
    zero_point: bool | _DLPack | None = None,
    scale_dtype: Literal["f32", "f16"] = "f32",
    mean: bool | _DLPack | None = None,
    rotate: bool = False,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> Quantized: ...
def hadamard(
    x: _Array,
    *,
    inverse: bool = False,
    dtype: _DType | None = None,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> _Array: ...
def expand_blocks(offsets: _Array, indices: _DLPack, key_blocks: int) -> _Array: ...
def engines() -> list[Engine]: ...
def install_as(
    name: Literal["flash_attn", "flash_attn_interface", "flash_attn.cute"],
) -> Callable[[], None]: ...
