"""fulgur's C API (include/fulgur/c.h) on PyTorch's tensors, by ctypes."""

import concurrent.futures
import ctypes

import torch
from gpu_case import DEVICE, empty

# The tensors of a pass, in the order of PyTorch's and ours: read, then written.
READ = {"forward": ("q", "k", "v"), "backward": ("dout", "q", "k", "v", "out", "lse")}
WRITTEN = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
STARTS = ("cu_seqlens_q", "cu_seqlens_k")


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


DTYPES = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.int32: (0, 32), torch.int64: (0, 64),
          torch.bool: (6, 8), torch.float16: (2, 16), torch.int8: (0, 8), torch.uint8: (1, 8),
          torch.float8_e4m3fn: (10, 8)}
DEVICES = {"cpu": 1, "cuda": 2}


def described(shape, dtype, data=None):
    """A DLTensor of contiguous rows; it refers to the memory at `data`."""
    return DLTensor(data, DEVICES[DEVICE], 0, len(shape), *DTYPES[dtype], 1, (ctypes.c_int64 * len(shape))(*shape),
                    None, 0)


class Struct(ctypes.Structure):
    """A struct of c.h: its size first, then all 0 but what is given."""

    def __init__(self, **given):
        super().__init__(struct_size=ctypes.sizeof(self), **given)


def fields(*names, of=ctypes.c_void_p):
    return [(name, of) for name in names]


SIZE = fields("struct_size", of=ctypes.c_size_t)


class Options(Struct):
    _fields_ = [
        *SIZE, *fields("window_left", "window_right", of=ctypes.c_int64), *fields("scale"),
        *fields("softcap", "dropout_p", of=ctypes.c_double), *fields("max_seqlen_q", "max_seqlen_k", of=ctypes.c_int64),
        *fields("deterministic", "invariant", "threads", of=ctypes.c_int), *fields("engine", of=ctypes.c_char_p),
        *fields("max_workspace", "chunk", of=ctypes.c_int64), *fields("top_left", of=ctypes.c_int),
        *fields("score_mod", "mask_mod", "algorithm", of=ctypes.c_char_p),
        *fields("fast_codes", "hadamard", of=ctypes.c_int),
    ]


class VarLen(Struct):
    _fields_ = [*SIZE, *fields(*STARTS, "seqused_q", "seqused_k")]


class KvCache(Struct):
    _fields_ = [*SIZE, *fields("page_table", "page_indptr", "cache_batch_idx", "leftpad_k")]


class SharedPrefix(Struct):
    _fields_ = [*SIZE, *fields("prefix_groups", "prefix_lens")]


class Descales(Struct):
    _fields_ = [*SIZE, *fields("q_descale", "k_descale", "v_descale", "k_zero_point", "v_zero_point"),
                *fields("k_format", "v_format", of=ctypes.c_char_p), *fields("k_mean")]


class Rotary(Struct):
    _fields_ = [*SIZE, *fields("cos", "sin", "rotary_seqlens"), *fields("interleaved", of=ctypes.c_int)]


class NewRows(Struct):
    _fields_ = [*SIZE, *fields("k_cache", "v_cache", "k_new", "v_new", "cu_seqlens_k_new", "cache_seqlens", "rotary",
                               "k_cache_descale", "v_cache_descale", "k_cache_zero_point", "v_cache_zero_point"),
                *fields("k_cache_format", "v_cache_format", of=ctypes.c_char_p), *fields("k_cache_mean")]


class ForwardArgs(Struct):
    _fields_ = [*SIZE, *fields("q", "k", "v", "out", "lse", "alibi_slopes", "rng_state", "sinks", "tree_mask",
                               "lengths", "cache", "shared_prefix", "append", "bias", "descales", "tensors"),
                ("tensor_count", ctypes.c_size_t)]


class BackwardArgs(Struct):
    _fields_ = [*SIZE, *fields("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "alibi_slopes", "rng_state",
                               "sinks", "dlse", "dsinks", "lengths", "bias", "dbias", "tensors"),
                ("tensor_count", ctypes.c_size_t)]


class AppendArgs(Struct):
    _fields_ = [*SIZE, *fields("rows", "cache", "q", "q_out", "cu_seqlens_q")]


# The structs in the structs of a call.
PARTS = {"lengths": VarLen, "cache": KvCache, "shared_prefix": SharedPrefix, "rotary": Rotary, "append": NewRows,
         "rows": NewRows, "descales": Descales}


def filled(struct, addresses, interleaved=False):
    """A struct with the tensors at `addresses`, by name, that it and its parts have, and what it refers to."""
    given, kept = {}, []
    for name, _ in struct._fields_[1:]:
        if name in PARTS:
            part, inner = filled(PARTS[name], addresses, interleaved)
            if any(getattr(part, field) for field, _ in PARTS[name]._fields_[1:] if field != "interleaved"):
                given[name] = ctypes.addressof(part)
                kept += [part, *inner]
        elif name == "interleaved":
            given[name] = interleaved
        elif name in addresses:
            given[name] = addresses[name]
    return struct(**given), kept


class Run(Struct):
    _fields_ = [*SIZE, *fields("stream", "workspace"), *fields("workspace_bytes", of=ctypes.c_int64),
                *fields("dropout_seed", "dropout_offset", of=ctypes.c_uint64)]


class WorkspaceNeed(Struct):
    _fields_ = [*SIZE, *fields("bytes", "alignment", "zeroed_bytes", of=ctypes.c_int64)]


ARGS = {"forward": ForwardArgs, "backward": BackwardArgs}


def options_of(case):
    return Options(window_left=case.window, window_right=0 if case.causal else -1, deterministic=case.deterministic,
                   max_seqlen_q=case.s if case.lengths else 0, max_seqlen_k=case.s if case.lengths else 0,
                   engine=DEVICE.encode())


class Fulgur:
    """The library at `path`. A call of it that fails raises RuntimeError."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.fulgur_last_error.restype = ctypes.c_char_p
        self.lib.fulgur_version.restype = ctypes.c_char_p
        self.plans = {}  # by pass and case

    def version(self):
        return self.lib.fulgur_version().decode()

    def call(self, function, *arguments):
        if getattr(self.lib, function)(*arguments) != 0:
            raise RuntimeError(f"{function}: {self.lib.fulgur_last_error().decode()}")

    def plan(self, which, case):
        """The plan of a pass, "forward" or "backward"; tensors are contiguous."""
        if (which, case) not in self.plans:
            names = [*READ[which], *WRITTEN[which], *(STARTS if case.lengths else ())]
            dtypes = {"lse": torch.float32, **dict.fromkeys(STARTS, torch.int32)}
            tensors = {name: described(case.shape(name), dtypes.get(name, torch.bfloat16)) for name in names}
            args, kept = filled(ARGS[which], {name: ctypes.addressof(t) for name, t in tensors.items()})
            plan = ctypes.c_void_p()
            self.call(f"fulgur_plan_{which}", ctypes.byref(args), ctypes.byref(options_of(case)), ctypes.byref(plan))
            self.plans[which, case] = plan
        return self.plans[which, case]

    def compile(self, calls):
        """Makes the plans of (pass, case) in many threads: the first of a kind compiles its kernels."""
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda call: self.plan(*call), calls))

    def prepared(self, which, case, tensors):
        """A function that runs a pass on the current stream, and the tensors by name that it writes. It has a
        workspace of its own."""
        plan, need = self.plan(which, case), WorkspaceNeed()
        self.call("fulgur_plan_workspace", plan, ctypes.byref(need))
        workspace = torch.zeros(need.bytes, dtype=torch.uint8, device=DEVICE)
        written = empty(case, *WRITTEN[which])
        names = [*READ[which], *(STARTS if case.lengths else ())]
        used = {name: tensors[name] for name in names} | written
        described_used = {name: described(t.shape, t.dtype, t.data_ptr()) for name, t in used.items()}
        args, kept = filled(ARGS[which], {name: ctypes.addressof(t) for name, t in described_used.items()})
        settings = Run(workspace=workspace.data_ptr(), workspace_bytes=need.bytes)

        def run():
            settings.stream = torch.cuda.current_stream().cuda_stream
            self.call(f"fulgur_plan_run_{which}", plan, ctypes.byref(args), ctypes.byref(settings))

        run.keep = (workspace, used, described_used, kept)
        return run, written
