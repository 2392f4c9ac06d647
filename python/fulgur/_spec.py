"""The arguments of fulgur's functions: names, types, defaults and documentation, said once.

From here come the signatures of the functions, the arguments sections of their documentation and,
by tools/make_stubs.py, the stubs. What the tensors are called, their dtypes and shapes, and which
call has which, comes from the library's own tables (src/call/tensors.h), as do the schemas of
PyTorch's operators and the operands of JAX's calls. A new tensor is a row here, in the group of
those with which it goes.
"""

import inspect
import textwrap
from typing import NamedTuple

from fulgur import _fulgur

# What each call of the library takes, "forward", "backward", "append" and "scores", by name.
TENSORS = {call: {x.name: x for x in entries} for call, entries in _fulgur.tensors().items()}
# The names of the tensors that each call reads where it is given them.
OPTIONAL = {
    call: tuple(x.name for x in entries.values() if not x.required and not x.written)
    for call, entries in TENSORS.items()
}
# The tensors that the forward pass alone takes: a call with one of them has no gradient.
WITHOUT_GRADIENT = tuple(x for x in OPTIONAL["forward"] if x not in TENSORS["backward"])

REQUIRED = inspect.Parameter.empty


class Row(NamedTuple):
    """Arguments that are documented together: their type in words of tools/make_stubs.py, their
    default, and what they mean. Where the library's tables say the dtype and the shape of such
    tensors, `text` goes on after them."""

    names: tuple
    kind: str
    default: object
    text: str

    def of(self, names):
        """The row of those arguments that are among `names`."""
        return self._replace(names=tuple(x for x in self.names if x in names))

    def documentation(self):
        return f"{', '.join(self.names)}: {_facts(self.names)}{self.text}"


def _facts(names):
    """The dtype and the shapes of tensors, where the library's tables say them."""
    found = [x[name] for name in names for x in TENSORS.values() if name in x]
    if not found or not all(x.dtype and x.shape for x in found):
        return ""
    return f"{found[0].dtype} {' and '.join(dict.fromkeys(x.shape for x in found))}"


def _rows(*rows):
    return tuple(Row(tuple(names.split()), kind, default, text) for names, kind, default, text in rows)


# The arguments of attention, in groups of what goes together. Rows of q, k and v come first.
_QKV = _rows(
    ("q", "tensor", REQUIRED, "``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 576."),
    (
        "k", "coded", REQUIRED,
        "``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.",
    ),
    (
        "v", "coded", REQUIRED,
        "``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.",
    ),
)  # fmt: skip
_MASK = _rows(
    ("causal", "bool", False, "query i of sq sees keys up to i + sk - sq."),
    (
        "window", "tuple[int, int] | None", None,
        "``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is unbounded. "
        "With ``causal`` both hold.",
    ),
    (
        "chunk", "int", 0,
        "of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off (the local "
        "layers of Llama 4).",
    ),
    (
        "top_left", "bool", False,
        "query i is at key i instead of key i + sk - sq, for the mask and ALiBi: the first query is at the "
        "first key of its sequence. Not with ``tree_mask`` or rotary embeddings.",
    ),
)  # fmt: skip
_SCORES = _rows(
    ("scale", "float | None", None, "of the scores; default 1 / sqrt(d)."),
    ("softcap", "float", 0.0, "0 is off."),
    ("alibi_slopes", "tensor", None, "."),
    (
        "bias", "tensor", None,
        "``(batch, hq, sq, sk)``, each of them may be 1: float32, bfloat16, float16 (float64 where q is) "
        "added to the scores, after softcap and ALiBi, where -inf, or less than -2**115, hides the key; or "
        "bool, True where the query sees the key. Packed sequences and caches count queries and keys in each "
        "sequence, and may have a bias of more of both.",
    ),
    (
        "sinks", "tensor", None,
        ": a score of each head that joins the softmax of every row, without a value: lse is "
        "log(exp(sink) + sum of exp(scores)). Not scaled, capped or masked; -inf is none (attention "
        "sinks, as gpt-oss learns them; StreamingLLM, arXiv 2309.17453).",
    ),
)  # fmt: skip
_EXPRESSIONS = _rows(
    (
        "score_mod", "expression", None,
        "what becomes of each score, after softcap and ALiBi and before the bias: a text, as in docs/expressions.md, "
        "a function, or an :class:`Expression`. Parameters of a function are named after what it needs: of score, b "
        "(sequence), h (q head), hk (kv head), q, k (query and key of the sequence), sq, sk (its lengths), q0 (its "
        "first packed query), delta (k - q - (sk - sq)), and of the tensors. On the CPU.",
    ),
    (
        "mask_mod", "expression", None,
        "likewise whether a query sees a key, of those that the other masks show; not of score.",
    ),
    (
        "tensors", "tensors", None,
        "arrays that score_mod and mask_mod index, by name: float32, bfloat16, float16, float64, int32, int64 or "
        "bool, of 1 to 4 dimensions, any strides.",
    ),
)  # fmt: skip
_DROPOUT = _rows(
    (
        "dropout_p", "float", 0.0,
        "0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.",
    ),
    ("seed offset", "int", 0, "of the dropout, 0 to 2^64 - 1."),
    (
        "rng_state", "tensor", None,
        ": seed and offset as an array, read when the call computes; instead of both numbers.",
    ),
)  # fmt: skip
_LENGTHS = _rows(
    (
        "cu_seqlens_q cu_seqlens_k", "tensor", None,
        ": sequence b is the packed rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``, rows around "
        "these are padding. Both or none, or ``cu_seqlens_q`` alone with a cache, whose k and v have "
        "four dimensions.",
    ),
    (
        "max_seqlen_q max_seqlen_k", "int", 0,
        "the longest packed sequences; 0 reads them from cu_seqlens, in host memory only. With a "
        "page_table max_seqlen_k bounds seqused_k; 0 is what the table has room for.",
    ),
    (
        "seqused_q", "tensor", None,
        ": only the first ``seqused_q[b]`` queries of sequence b exist: the rows after are padding, "
        "with out 0, lse -inf and gradients 0.",
    ),
    ("seqused_k", "tensor", None, ": only the first ``seqused_k[b]`` keys of sequence b exist."),
)  # fmt: skip
_TABLES = _rows(
    (
        "page_table", "tensor", None,
        "int32 ``(batch, max_pages)``: k is ``(pages, page, hk, d)``, v ``(pages, page, hk, dv)``, and "
        "key j of sequence b is row ``j % page`` of page ``page_table[b, j // page]``. seqused_k must "
        "be given.",
    ),
    (
        "page_indptr", "tensor", None,
        ": page_table is ``(ids,)``, and the pages of sequence b are "
        "``page_table[page_indptr[b]:page_indptr[b + 1]]``.",
    ),
    ("cache_batch_idx", "tensor", None, ": sequence b is row ``cache_batch_idx[b]`` of k and v."),
)  # fmt: skip
_CACHE = _TABLES + _rows(
    ("leftpad_k", "tensor", None, ": the first ``leftpad_k[b]`` keys of sequence b do not exist."),
    (
        "tree_mask", "tensor", None,
        ", sq <= 64: a word of bits for each query. The last sq keys of a sequence are the tokens of "
        "its queries, and bit j says whether a query sees the jth of them, where the mask shows it, "
        "too (drafts of speculative decoding). Earlier keys are as without it. It has no gradient.",
    ),
    (
        "prefix_groups prefix_lens", "tensor", None,
        ", with a page_table: sequences ``prefix_groups[g]`` to ``prefix_groups[g + 1] - 1`` have the "
        "same first ``prefix_lens[g]`` keys and values, all of them in front of the queries' own, "
        "which are read once, through the pages of the first sequence, where that pays. Both or none.",
    ),
)  # fmt: skip
_DESCALES = _rows(
    (
        "q_descale k_descale v_descale", "tensor", None,
        "float32 or float16: what codes of q, k and v are multiplied by, default 1. ``(1,)``, "
        "``(batch, hk)``, each of which may be 1, or the shape of q, k or v but for the last dimension: "
        "a number of groups of columns. On the CPU k and v may be float8, int8, or a :class:`Quantized`, "
        "which brings its own, or other floats than q; on GPUs they may be float8, int8 or int4 with a q of "
        "bf16, f16 or float8, whose descale then has one group.",
    ),
    (
        "k_zero_point v_zero_point", "tensor", None,
        "of int8 and int4, which is taken from the codes first, in the shape of the descale; default 0.",
    ),
    (
        "k_mean", "tensor", None,
        "float32 ``(batch, hk, d)``, of which batch may be 1: what the rows of codes of k have besides, which lse "
        "says, too. Not with both softcap and alibi_slopes.",
    ),
    (
        "hadamard", "bool", False,
        "k holds codes of rows that :func:`hadamard` has rotated, and a q of floats is rotated likewise; a Quantized k "
        "says it itself.",
    ),
)  # fmt: skip
_DETERMINISTIC = _rows(
    ("deterministic", "bool", False, "the backward pass gives the same bits in every run."),
)
_HOW = _rows(
    (
        "invariant", "bool", False,
        "a sequence's bits do not depend on its batch or on the number of threads.",
    ),
    (
        "fast_codes", "bool", False,
        "P V of float8_e4m3fn arrays in e4m3, too, on Hopper GPUs: faster, and off by what e4m3 rounds of P and "
        "of V less its mean.",
    ),
    (
        "max_workspace", "int", 0,
        "the bytes that the call may want besides its arrays at most; 0 is any number. Gradients on a "
        "GPU then take a slower form that fits; where none does, an error says the minimum.",
    ),
)  # fmt: skip
_THREADS = _rows(("threads", "int", 0, "0 is OMP_NUM_THREADS or all cores."))
_ENGINE = _THREADS + _rows(
    ("engine", "str", "", '"" picks; "cpu", "cuda" or "reference" (``fulgur.engines()``).'),
)
_ALGORITHM = _rows(
    (
        "algorithm", "str", "",
        '"" picks; "standard", "fa1", "fa2" or "fa3" forces one of the papers\' algorithms, of an engine '
        "that has it (docs/algorithms.md).",
    ),
)  # fmt: skip
_RETURN_LSE = _rows(("return_lse", "bool", False, "return ``(out, lse)``."))
_OUT = _rows(
    ("out", "result", None, "where to write, shape of q but for dv columns, dtype of q."),
)
_STREAM = _rows(
    (
        "stream", "stream", None,
        "on CUDA, where to put the work; default the current stream of q's library. Lengths, "
        "prefix_groups and prefix_lens, alibi_slopes and sinks may lie on the CPU then.",
    ),
)  # fmt: skip
_PLANNED = _rows(
    ("dtype", "dtype", "f32", 'where shapes are given: "f32", "bf16", "f16" or "f64".'),
    ("device", "str", "cpu", 'where shapes are given: "cpu", "cuda" or "cuda:0".'),
    (
        "card", "str", "",
        'a GPU by its name, such as "a100" or "rtx-4090", which need not be here: what it would get, what it is '
        "expected to take and what binds. Arguments are shapes, device is cuda, and the plan runs nowhere.",
    ),
)  # fmt: skip
_PLANNED_QKV = _rows(
    (
        "q k v", "planned", REQUIRED,
        "arrays as for :func:`attention`, or only their shapes; nothing is computed. Their shapes, "
        "strides and dtypes are what is planned for.",
    ),
)  # fmt: skip
_SAVED = _rows(
    ("dout", "tensor", REQUIRED, "the gradient of out, shape and dtype of out."),
    ("q k v", "tensor", REQUIRED, "as given to :func:`attention`."),
    ("out lse", "tensor", REQUIRED, "as :func:`attention` returned them with ``return_lse=True``."),
)
_PLANNED_SAVED = _rows(
    (
        "dout q k v out lse", "planned", REQUIRED,
        "arrays as for :func:`attention_backward`, or only their shapes; nothing is computed. Their "
        "shapes, strides and dtypes are what is planned for.",
    ),
)  # fmt: skip
_GRADIENTS = _rows(
    ("dlse", "dlse", None, "the gradient of lse, shape and dtype of lse; default 0."),
    ("dq dk dv", "result", None, "where to write, with the shapes and the dtype of q, k and v."),
    ("dsinks", "result", None, ": where to write; with sinks alone."),
    (
        "dbias", "result", None,
        "the shape of bias, float32 or its dtype: where to write the gradient of the bias, which is computed "
        "where this is given; dimensions of 1 are summed over, and strides may be any.",
    ),
    (
        "dtensors", "gradients", None,
        "which of the tensors of floats get their gradient: arrays to write it to by name, in the shape of the "
        "tensor, float32 or its dtype, or None for a fresh one.",
    ),
)
_STAGE = _rows(
    (
        "stage", "stage", REQUIRED,
        '"scaled" is ``scale * q k^T``, "softcap" what softcap makes of it, "masked" with ALiBi, the bias and the '
        'mask what the softmax takes, -inf where the query does not see the key, and "probabilities" what the '
        "softmax with the sinks gives, all 0 in a row that sees no key.",
    ),
    (
        "rows", "indices", None,
        "the queries of each sequence that are wanted: their numbers, or a slice of them; default all.",
    ),
)  # fmt: skip
_NEW_ROWS = _rows(
    (
        "k_cache v_cache", "coded", REQUIRED,
        "written in place: ``(batch, sk, hk, dim)`` or ``(pages, page, hk, dim)``, as "
        ":func:`attention` takes them. Rows that take no token keep their bits.",
    ),
    (
        "k_new v_new", "tensor", REQUIRED,
        "``(batch, s_new, hk, dim)``, or packed ``(total, hk, dim)`` with cu_seqlens_k_new; dtype of "
        "the caches.",
    ),
    (
        "cache_seqlens", "tensor", REQUIRED,
        ": the old lengths, counted from the first row of each sequence, left padding included.",
    ),
)  # fmt: skip
_NEW_LENGTHS = _rows(
    ("cu_seqlens_k_new", "tensor", None, ": where the new rows of each sequence begin."),
)
_ROTARY = _rows(
    (
        "cos sin", "tensor", None,
        "``(positions, rotary_dim / 2)``, dtype of the caches or float32: rotary position embedding "
        "of the first rotary_dim columns of new keys, computed in float32 (float64 for float64) and "
        "rounded once. Values are not rotated.",
    ),
    (
        "interleaved", "bool", False,
        "columns 2 i and 2 i + 1 are a pair, or else i and i + rotary_dim / 2.",
    ),
    (
        "rotary_seqlens", "tensor", None,
        ": the position of each sequence's first new token; default cache_seqlens.",
    ),
)  # fmt: skip
_ROTATED = _rows(
    (
        "q", "tensor", None,
        "queries to rotate with, ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)`` with "
        "cu_seqlens_q. As FlashAttention has it, query i is rotated to the position of the first new token "
        "+ i if ``causal``, ``window`` or ``chunk`` hides keys, else all to that of the first.",
    ),
    ("q_out", "result", None, "where the rotated queries go; may be q itself."),
    ("cu_seqlens_q", "tensor", None, "."),
)  # fmt: skip


class Function(NamedTuple):
    """The arguments of a function, those by position and those by keyword, and the function that
    documents the ones that have no text here."""

    positional: tuple
    keywords: tuple
    documented_by: str = ""
    texts: dict = {}

    def names(self):
        return [name for row in self.keywords for name in row.names]

    def signature(self, of_method):
        by_position, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        rows = [(by_position, row) for row in self.positional] + [(by_keyword, row) for row in self.keywords]
        parameters = [inspect.Parameter("self", by_position)] if of_method else []
        for kind, row in rows:
            parameters += [inspect.Parameter(name, kind, default=row.default) for name in row.names]
        return inspect.Signature(parameters)

    def documentation(self):
        """The lines of the arguments section."""
        lines, elsewhere = [], []
        for row in self.positional + self.keywords:
            text = self.texts.get(" ".join(row.names))
            if text is not None:
                row = row._replace(text=text)
            elif self.documented_by:
                elsewhere += row.names
                continue
            lines.append(row.documentation())
        if elsewhere:
            lines.append(f"{', '.join(elsewhere)}: as for :func:`{self.documented_by}`.")
        fill = textwrap.TextWrapper(96, subsequent_indent="    ", break_on_hyphens=False).fill
        return "\n".join(map(fill, lines))


def _only(names, *groups):
    """The rows of those arguments of `groups` that are among `names`."""
    rows = (row.of(names) for row in sum(groups, ()))
    return tuple(row for row in rows if row.names)


def _less(names, *groups):
    """The rows of those that are not."""
    every = {name for row in sum(groups, ()) for name in row.names}
    return _only(every - set(names.split()), *groups)


_OPTIONS = _MASK + _SCORES + _EXPRESSIONS + _DROPOUT + _LENGTHS
_GRADIENT_OPTIONS = _OPTIONS + _DETERMINISTIC + _HOW + _ENGINE + _ALGORITHM
_EVERY_OPTION = _OPTIONS + _CACHE + _DESCALES + _DETERMINISTIC + _HOW + _ENGINE + _ALGORITHM
_PLANNED_OUT = {"out": "given if runs will give one with other strides than a fresh array has."}
_PLANNED_GRADIENTS = {
    "dlse": "given, an array or its shape, if runs will give one.",
    "dq dk dv": "given if runs will give ones with other strides than fresh arrays have.",
    "dsinks": ": likewise; with sinks alone.",
    "dbias": "given if runs will give one.",
    "dtensors": "given if runs will give ones.",
}
_NEW_QUERIES = _rows(
    ("q", "tensor", REQUIRED, "``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``."),
)
_APPEND = _NEW_LENGTHS + _TABLES + _ROTARY + _ROTATED + _MASK
_APPEND_ATTENTION = (
    _NEW_LENGTHS + _ROTARY + _MASK + _SCORES + _EXPRESSIONS + _less("cu_seqlens_k seqused_k", _LENGTHS) + _CACHE + _HOW
)
_OF_SCORES = _MASK + _SCORES + _EXPRESSIONS + _LENGTHS + _less("prefix_groups prefix_lens", _CACHE)
_WORKSPACE = _rows(
    (
        "workspace", "tensor", None,
        "a writable contiguous array as :meth:`workspace` wants it, on the device that computes, for "
        "one run at a time; default the library's own memory.",
    ),
)  # fmt: skip
_LSE = _rows(("lse", "result", None, "where to write; only where the plan has ``return_lse``."))
_BACKWARD = _rows(("backward", "bool", False, "the plan of :func:`attention_backward`."))
_OF_RUNS = {*sum(OPTIONAL.values(), ()), "seed", "offset", "tensors"}


def _of_run(*groups):
    """The rows of what may change from run to run."""
    return _only(_OF_RUNS, *groups)


# Arguments that fulgur.torch and fulgur.jax lack: random numbers, threads, devices and streams are those of PyTorch
# and of XLA.
_OF_EXPRESSIONS = " score_mod mask_mod tensors"
_TORCHS = "seed offset rng_state threads engine algorithm out stream"
_JAXS = "rng_state threads engine algorithm out stream"
_OF_TORCH = {
    "alibi_slopes": "; gets no gradient.",
    "dropout_p": "0 <= p < 1; the random numbers come from PyTorch's generator of q's device.",
    "deterministic": "the backward pass gives the same bits in every run; so it does under "
    "``torch.use_deterministic_algorithms(True)``.",
}
_OF_JAX = {
    "scale": "of the scores; default 1 / sqrt(d). Known when the call is traced, as are all numbers "
    "but for seed and offset.",
    "alibi_slopes": "; gets no gradient.",
    "seed offset": "of the dropout: 0 to 2^64 - 1, a scalar array of integers, whose bits count, or a "
    "key of ``jax.random``, of ``key`` or of ``PRNGKey``.",
    "tree_mask": ", sq <= 64: bit j says whether a query sees the jth of the last sq keys, the drafted "
    "tokens. NumPy has int64, JAX under ``jax_enable_x64`` alone, and may give the low and the high "
    "half of each word instead: uint32 ``(batch, sq, 2)`` or ``(total_q, 2)``.",
}


def _texts(*groups):
    """What these rows say, in a function where the others are documented by another one."""
    return {" ".join(row.names): row.text for row in sum(groups, ())}


_ROWS_TO_APPEND = _texts(_NEW_QUERIES, _NEW_ROWS, _NEW_LENGTHS, _ROTARY)
_RESULTS = _RETURN_LSE + _OUT + _STREAM

FUNCTIONS = {
    "attention": Function(_QKV, _EVERY_OPTION + _RESULTS),
    "attention_backward": Function(
        _SAVED, _GRADIENT_OPTIONS + _GRADIENTS + _STREAM, "attention", _texts(_SAVED, _GRADIENTS)
    ),
    "plan": Function(
        _PLANNED_QKV, _PLANNED + _less("seed offset", _EVERY_OPTION) + _RETURN_LSE + _OUT, "attention",
        _texts(_PLANNED_QKV, _PLANNED) | _PLANNED_OUT,
    ),
    "plan_backward": Function(
        _PLANNED_SAVED, _PLANNED + _less("seed offset", _GRADIENT_OPTIONS) + _GRADIENTS, "attention",
        _texts(_PLANNED_SAVED, _PLANNED) | _PLANNED_GRADIENTS,
    ),
    "Plan.run": Function(
        _QKV, _of_run(_EVERY_OPTION) + _OUT + _LSE + _WORKSPACE + _STREAM, "attention",
        _texts(_LSE, _WORKSPACE),
    ),
    "BackwardPlan.run": Function(
        _SAVED, _of_run(_GRADIENT_OPTIONS) + _GRADIENTS + _WORKSPACE + _STREAM, "attention_backward",
        _texts(_WORKSPACE),
    ),
    "explain": Function(
        _PLANNED_QKV, _BACKWARD + _PLANNED + _EVERY_OPTION, "attention",
        _texts(_PLANNED_QKV, _BACKWARD, _PLANNED),
    ),
    "append": Function(
        _NEW_ROWS, _APPEND + _THREADS + _STREAM, "attention",
        _texts(_NEW_ROWS, _NEW_LENGTHS, _ROTARY, _ROTATED),
    ),
    "append_attention": Function(
        _NEW_QUERIES + _NEW_ROWS, _APPEND_ATTENTION + _ENGINE + _ALGORITHM + _RESULTS, "attention", _ROWS_TO_APPEND
    ),
    "scores": Function(_QKV[:2], _STAGE + _OF_SCORES + _ENGINE, "attention", _texts(_STAGE)),
    "torch.attention": Function(_QKV, _less(_TORCHS, _EVERY_OPTION, _RETURN_LSE), "", _OF_TORCH),
    "torch.append": Function(_NEW_ROWS, _APPEND, "fulgur.append"),
    "torch.append_attention": Function(
        _NEW_QUERIES + _NEW_ROWS, _less(_OF_EXPRESSIONS, _APPEND_ATTENTION) + _RETURN_LSE, "fulgur.append_attention"
    ),
    "torch.scores": Function(_QKV[:2], _STAGE + _OF_SCORES, "fulgur.scores"),
    "jax.attention": Function(_QKV, _less(_JAXS, _EVERY_OPTION, _RETURN_LSE), "", _OF_JAX),
    "jax.append": Function(_NEW_ROWS, _less("q_out", _APPEND), "fulgur.append"),
    "jax.append_attention": Function(
        _NEW_QUERIES + _NEW_ROWS, _less(_OF_EXPRESSIONS, _APPEND_ATTENTION) + _RETURN_LSE, "fulgur.append_attention"
    ),
}  # fmt: skip
_KEYWORDS = {name: frozenset(function.names()) for name, function in FUNCTIONS.items()}


def described(name):
    """Gives a function, which takes its keyword arguments as one dict, their signature and, for
    ``{arguments}`` in its documentation, what they mean."""

    def describe(function):
        function.__signature__ = FUNCTIONS[name].signature(of_method=name.endswith(".run"))
        if function.__doc__ is not None:  # as under python -OO
            function.__doc__ = document(name, function.__doc__)
        return function

    return describe


def document(name, text):
    """A documentation with its arguments section."""
    place = "{arguments}"
    line = next((x for x in text.splitlines() if x.strip() == place), place)
    indent = line.removesuffix(place)
    return text.replace(line, textwrap.indent(FUNCTIONS[name].documentation(), indent))


def check(name, given):
    """Raises where a call has an argument that the function does not know."""
    if not given.keys() <= _KEYWORDS[name]:
        (unknown, *_) = given.keys() - _KEYWORDS[name]
        function = name.rpartition(".")[2]
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
