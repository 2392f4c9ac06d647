"""Attention over sequences whose rows lie in several processes: context parallelism.

    import torch.distributed as dist
    import fulgur.distributed

    rows = fulgur.distributed.rows_of("zigzag", length, dist.get_world_size(), dist.get_rank())
    out = fulgur.distributed.attention(q[:, rows], k[:, rows], v[:, rows], group=dist.group.WORLD,
                                       sharding="zigzag", causal=True)

Every process calls it with its rows of the sequences and gets those of the result. With ``invariant`` both passes
have the bits of one process, whatever the number of processes. See docs/distributed.md.
"""

import datetime
import os
import pathlib
import socket
import sys
import weakref

import numpy as np

from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur._calls import gradients

__all__ = ["Group", "attention", "attention_backward", "rows_of"]

_TENSORS = (
    "alibi_slopes", "sinks", "bias", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "rng_state",
    "page_table", "k_descale", "v_descale", "k_zero_point", "v_zero_point",
)  # fmt: skip
_EXPRESSIONS = ("score_mod", "mask_mod", "tensors")
_READ_HERE = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}
_KNOWN = {
    *_TENSORS, *_EXPRESSIONS, *_fulgur.option_defaults(), "causal", "window", "seed", "offset", "threads", "engine",
}  # fmt: skip


class Group:
    """The processes that compute together. All of them make the same calls of a group in one order.

    Once a process leaves or hangs, each call raises fulgur.Error that names it, and so does every later one.

    Args:
        exchange: sends ``sends[r]`` to rank r and fills ``receives[r]`` with what comes from there: lists of arrays of
            uint8, whose own are empty. It raises where a rank has left.
        rank, size: of this process, and how many there are.
    """

    def __init__(self, exchange, rank, size):
        self._group = _fulgur.Group.from_exchange(rank, size, exchange)

    @classmethod
    def _of(cls, group):
        self = cls.__new__(cls)
        self._group = group
        return self

    @classmethod
    def from_env(cls, deadline=300.0):
        """The processes that torchrun, mpirun or srun has started, by sockets between them.

        A process that makes no step for ``deadline`` seconds hangs.

        >>> import fulgur.distributed
        >>> fulgur.distributed.Group.from_env().size
        1
        """
        return cls._of(_fulgur.Group.from_env(_a.real("deadline", deadline)))

    @classmethod
    def connect(cls, rank, size, host, port, deadline=300.0):
        """The same; rank 0 listens there, on a network that is trusted."""
        return cls._of(_fulgur.Group.connect(rank, size, host, port, _a.real("deadline", deadline)))

    @classmethod
    def from_nccl(cls, comm, deadline=300.0):
        """By a communicator of NCCL, for GPUs of one machine or several: rows and what ranks say go by it.

        Args:
            comm: the address of an ncclComm_t, an int. It stays the caller's and lives longer than the group.
            deadline: a step that takes more seconds, or a rank that leaves, aborts the communicator.
        """
        if not isinstance(comm, int) or comm < 0:
            raise ValueError(f"comm: got {comm!r}, want the address of an ncclComm_t")
        return cls._of(_fulgur.Group.from_nccl(comm, _a.real("deadline", deadline)))

    @classmethod
    def simulated(cls, rank, size):
        """This process alone, which computes what a rank of so many would, to measure it.

        The rows of the others are its own, as many, where they would lie.

        >>> import fulgur.distributed
        >>> fulgur.distributed.Group.simulated(3, 1000).size
        1000
        """
        rank, size = _a.integer("rank", rank, *_a.INT32), _a.integer("size", size, *_a.INT32)
        return cls._of(_fulgur.Group.simulated(rank, size))

    @classmethod
    def from_torch(cls, group):
        """That of a ProcessGroup of PyTorch, or a DeviceMesh of one dimension.

        Processes of one machine get sockets of their own, which answer sooner than PyTorch's messages.
        """
        if hasattr(group, "get_group"):  # a DeviceMesh
            group = group.get_group()
        if group not in _of_torch:
            exchange, rank, size = _TorchExchange(group), group.rank(), group.size()
            port = exchange.port_of_machine(rank, size)
            _of_torch[group] = (
                cls(exchange, rank, size) if port is None else cls.connect(rank, size, _LOOPBACK, port)
            )
        return _of_torch[group]

    @property
    def rank(self):
        return self._group.rank

    @property
    def size(self):
        return self._group.size

    @property
    def dead(self):
        """Why the group is dead; "" while it is not."""
        return self._group.dead


_of_torch = weakref.WeakKeyDictionary()
_LOOPBACK = "127.0.0.1"
_DEADLINE = datetime.timedelta(seconds=300)  # of Group.from_env()


def _machine():
    """What is the same in all processes that reach each other by the loopback interface; None where nothing is."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot.strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        return None


class _TorchExchange:
    """By the messages of a ProcessGroup; one of GPUs alone gets another one of the same processes."""

    def __init__(self, group):
        from torch import distributed as dist

        self._own = None
        if "gloo" not in dist.get_backend_config(group):
            ranks = dist.get_process_group_ranks(group)
            self._own = dist.new_group(
                ranks, timeout=_DEADLINE, backend="gloo", use_local_synchronization=True
            )
        self._group = weakref.ref(self._own or group)

    def port_of_machine(self, rank, size):
        """A free port of the machine that all processes run on; None where they run on several."""
        from torch import distributed as dist

        with socket.socket() as free:
            free.bind((_LOOPBACK, 0))
            places = [None] * size
            dist.all_gather_object(places, (_machine(), free.getsockname()[1]), group=self._group())
        machine, port = places[0]
        return port if machine is not None and all(place[0] == machine for place in places) else None

    def __call__(self, sends, receives):
        import torch
        from torch import distributed as dist

        group = self._group()
        works = []
        for start, arrays in ((dist.isend, sends), (dist.irecv, receives)):
            for rank, array in enumerate(arrays):
                if array.size:
                    peer = dist.get_global_rank(group, rank)
                    works.append((rank, start(torch.from_numpy(array), peer, group=group)))
        for rank, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"rank {rank} left: {error}") from None


def rows_of(sharding, length, ranks, rank, *, causal=True, window=None, chunk=0, top_left=False):
    """The rows of a sequence that a rank has, in their order: for data loaders and position ids.

    Args:
        sharding: "contiguous", for full masks and windows; "zigzag", for causal masks; "by_area", for packed
            sequences, where all ranks have as many visible scores. Sequences are cut at multiples of 64 rows.
        length: of the sequence, or the cu_seqlens of packed ones, whose rows are counted together.
        ranks, rank: how many there are, and which one.
        causal, window, chunk, top_left: the mask, by which "by_area" goes.

    Returns:
        An array of int64.

    >>> import fulgur.distributed
    >>> fulgur.distributed.rows_of("zigzag", 512, 2, 1)[[0, 127, 128, -1]]
    array([128, 255, 256, 383])
    """
    mask = dict(causal=causal, window=window, chunk=chunk, top_left=top_left)
    options = _a.options(mask)
    sides = [options[name] for name in ("window_left", "window_right", "chunk", "top_left")]
    ranks, rank = _a.integer("ranks", ranks, *_a.INT32), _a.integer("rank", rank, *_a.INT32)
    if np.ndim(length) == 0:
        length = _a.integer("length", length, *_a.INT64)
        rows = _fulgur.rows_of_length(sharding, length, ranks, rank, *sides)
    else:
        rows = _fulgur.rows_of_sequences(sharding, np.asarray(length).tolist(), ranks, rank, *sides)
    return np.array(rows, np.int64)


def attention(q, k, v, *, group, sharding="contiguous", head_ranks=1, ring=False, return_lse=False, **options):
    """:func:`fulgur.attention` of sequences whose rows lie in all processes of a group.

    Args:
        q, k, v: the rows of this process, on the CPU or on a GPU: ``(batch, rows, heads, dim)`` or packed
            ``(rows, heads, dim)`` with the cu_seqlens of whole sequences.
        group: a :class:`Group`, or a ProcessGroup or DeviceMesh of PyTorch.
        sharding: which rows a process has, see :func:`rows_of`.
        head_ranks: so many processes side by side exchange heads for rows before they compute (Ulysses). It divides
            the processes and the heads of k.
        ring: keys of one process at a time come, and partial results are merged: less memory, for other last bits than
            those of one process. Calls do so by themselves where max_workspace forbids to gather keys.
        return_lse: also return the log-sum-exp of each row.
        options: causal, window, chunk, top_left, scale, softcap, alibi_slopes, sinks, bias, score_mod, mask_mod,
            tensors, dropout_p, seed, offset, rng_state, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, invariant,
            deterministic, max_workspace, threads, engine, as for :func:`fulgur.attention`. All but q, k and v are
            those of whole sequences, the same in all processes.

    With the sharding "by_page" k and v are caches, of which each process has some pages (docs/distributed.md): q and
    the results are whole, ``page_table`` is that of this process, ``seqused_k`` has the lengths in all of them, and
    caches of codes bring their descales. No gradients are recorded.

    Tensors of PyTorch record gradients to q, k, v, sinks, bias and tensors; those of the last three are whole in each
    process.

    Returns:
        The rows of out, with ``return_lse`` also those of lse.

    Raises:
        ValueError, TypeError: an argument is wrong, on any rank, which the message names.
        fulgur.Error: a rank has left or hangs.
    """
    call = _Call(group, sharding, head_ranks, ring, options)
    return_lse = _a.flag("return_lse", return_lse)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from fulgur.torch._distributed import attention as of_torch

        results = of_torch(call, q, k, v)
    else:
        results = call.forward(dict(q=q, k=k, v=v), return_lse)
    return tuple(results) if return_lse else results[0]


def attention_backward(
    dout, q, k, v, out, lse, *, group, sharding="contiguous", head_ranks=1, ring=False, dlse=None, dbias=None,
    dtensors=None, **options,
):  # fmt: skip
    """:func:`fulgur.attention_backward` likewise, of the rows of this process.

    Returns:
        (dq, dk, dv), after them dsinks with sinks, dbias where it is given, and with dtensors a dict of these, which
        are the same on all processes.
    """
    call = _Call(group, sharding, head_ranks, ring, options)
    given = dict(dlse=dlse, dbias=dbias, dtensors=dtensors)
    return call.backward(dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse), given)


def _on_host(array):
    """What all processes read, in the host's memory: an array of PyTorch may lie on a GPU."""
    return array.cpu() if getattr(array, "is_cuda", False) else array


class _Call:
    """What calls of all processes have in common."""

    def __init__(self, group, sharding, head_ranks, ring, given):
        for name in given.keys() - _KNOWN:
            raise TypeError(f"attention() got an unexpected keyword argument {name!r}")
        self.group = (group if isinstance(group, Group) else Group.from_torch(group))._group
        if not isinstance(sharding, str):
            raise TypeError(f"sharding: got {sharding!r}, want a string")
        self.how = sharding, _a.integer("head_ranks", head_ranks, *_a.INT32), _a.flag("ring", ring)
        self.options = _a.options(given)
        self.random = _a.random_numbers(given)
        self.tensors = {name: given[name] for name in _TENSORS if given.get(name) is not None}
        for name in self.tensors.keys() & _READ_HERE:
            self.tensors[name] = _on_host(self.tensors[name])
        self.expressions = {name: given[name] for name in _EXPRESSIONS if given.get(name) is not None}

    def forward(self, arrays, with_lse):
        mods, bound = _e.of_call(self.expressions)
        stream = _a.run_stream(arrays["q"], {})
        views = _a.views(stream, **arrays, **self.tensors) | bound
        results = _a.forward_results(views["q"], views["v"], with_lse)
        options = _a.of_rotated_keys(self.options, arrays["q"], k=arrays["k"], v=arrays["v"]) | mods
        return _a.filled(
            results, {}, arrays["q"],
            lambda written: _fulgur.forward_by_group(
                self.group, *self.how, views | written, options, stream, *self.random
            ),
            stream,
        )  # fmt: skip

    def backward(self, arrays, given):
        mods, bound = _e.of_call(self.expressions)
        stream = _a.run_stream(arrays["q"], {})
        return gradients(
            lambda views: _fulgur.backward_by_group(
                self.group, *self.how, views, self.options | mods, stream, *self.random
            ),
            arrays, bound, self.tensors | given, stream,
        )  # fmt: skip
