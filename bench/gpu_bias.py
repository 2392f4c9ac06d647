"""Calls with a dense bias or mask next to plain ones and to PyTorch's kernels, on a GPU.

gpu_bias.py --library libfulgur.so [--json FILE]: milliseconds of each kind of bias, forward and backward, 16k tokens,
hidden 2048, bf16, full, in turns with a plain call. A dense bias of 16 bits moves 2 bytes a score from memory where
each head has its own. Masks are random (10% hidden), of keys alone (5% hidden, at the ends), true everywhere, or of
four documents. --before: another build of the library, in turns with this one.
"""

import argparse
import ctypes
import json

import torch
from fulgur_c import ARGS, Fulgur, Run, WorkspaceNeed, described, filled, options_of
from gpu_case import DEVICE, Case, empty, inputs
from gpu_report import turns
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, HIDDEN = 16384, 2048
KINDS = {  # dtype, and whether each head has its own
    "plain": None, "bool": (torch.bool, False), "keys": (torch.bool, False), "all true": (torch.bool, False),
    "documents": (torch.bool, False), "bool a head": (torch.bool, True), "bf16": (torch.bfloat16, False),
    "f32": (torch.float32, False), "bf16 a head": (torch.bfloat16, True),
}
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


def bias_of(kind, case, generator):
    if KINDS[kind] is None:
        return None
    dtype, of_heads = KINDS[kind]
    shape = (1, case.heads if of_heads else 1, case.s, case.s)
    position = torch.arange(case.s, device=DEVICE)
    if kind == "keys":
        return (position < case.s * 19 // 20).expand(case.batch, 1, 1, case.s).contiguous()
    if kind == "all true":
        return torch.ones(shape, dtype=dtype, device=DEVICE)
    if kind == "documents":
        document = position * 4 // case.s
        return (document[:, None] == document).view(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator, device=DEVICE) > 0.1
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


class Ours:
    """Calls of a pass with a bias."""

    def __init__(self, library, which, case, tensors, names):
        self.keep = [tensors]
        used = {name: tensors[name] for name in names}
        data = {name: described(t.shape, t.dtype, t.data_ptr()) for name, t in used.items()}
        self.args, kept = filled(ARGS[which], {name: ctypes.addressof(t) for name, t in data.items()})
        self.library, self.which, plan = library, which, ctypes.c_void_p()
        library.call(f"fulgur_plan_{which}", ctypes.byref(self.args), ctypes.byref(options_of(case)),
                     ctypes.byref(plan))
        need = WorkspaceNeed()
        library.call("fulgur_plan_workspace", plan, ctypes.byref(need))
        workspace = torch.zeros(need.bytes, dtype=torch.uint8, device=DEVICE)
        self.plan, self.settings = plan, Run(workspace=workspace.data_ptr(), workspace_bytes=need.bytes)
        self.keep += [data, kept, workspace]

    def __call__(self):
        self.settings.stream = torch.cuda.current_stream().cuda_stream
        self.library.call(f"fulgur_plan_run_{self.which}", self.plan, ctypes.byref(self.args),
                          ctypes.byref(self.settings))


def sdpa(tensors, bias, backend, gradient):
    """PyTorch's forward pass, and its backward pass; q, k and v are (batch, s, heads, d)."""
    q, k, v = (tensors[name].transpose(1, 2).detach().requires_grad_() for name in ("q", "k", "v"))
    leaves = [q, k, v]
    if gradient and bias is not None and bias.is_floating_point():
        bias = bias.detach().requires_grad_()
        leaves.append(bias)

    def forward():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    out = forward()
    dout = tensors["dout"].transpose(1, 2)
    return forward, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), out


def measure(library, case, kind, generator, burst, rounds, before=None, peers=PEERS):
    tensors = inputs(case, generator)
    tensors |= empty(case, "out", "lse", "dq", "dk", "dv")
    bias = bias_of(kind, case, generator)
    names = ["q", "k", "v", "out", "lse"]
    gradients = ["dout", "dq", "dk", "dv", *names]
    if bias is not None:
        tensors["bias"] = bias
        names, gradients = [*names, "bias"], [*gradients, "bias"]
    forward = Ours(library, "forward", case, tensors, names)
    forward()
    backward = {"fulgur": Ours(library, "backward", case, tensors, gradients)}
    forwards = {"fulgur": forward}
    if bias is not None:
        plain = [[n for n in of if n != "bias"] for of in (names, gradients)]
        forwards["plain"] = Ours(library, "forward", case, tensors | empty(case, "out", "lse"), plain[0])
        backward["plain"] = Ours(library, "backward", case, tensors | empty(case, "dq", "dk", "dv"), plain[1])
    if before:
        forwards["before"] = Ours(before, "forward", case, tensors | empty(case, "out", "lse"), names)
        backward["before"] = Ours(before, "backward", case, tensors | empty(case, "dq", "dk", "dv"), gradients)
    if hasattr(ARGS["backward"], "dbias") and bias is not None and bias.is_floating_point():
        tensors["dbias"] = torch.empty_like(bias)
        backward["fulgur dbias"] = Ours(library, "backward", case, tensors, [*gradients, "dbias"])
    for run in (*forwards.values(), *backward.values()):
        run()
    row = {"case": str(case), "kind": kind, "s": case.s, "d": case.d}
    for name, backend in peers.items():
        mask = bias if bias is None or bias.dtype == torch.bool else bias.to(torch.bfloat16)
        try:
            peer, peer_backward, out = sdpa(tensors, mask, backend, True)
            forwards[name], backward[name] = peer, peer_backward
            ours = tensors["out"].transpose(1, 2).float()
            row[f"off {name}"] = ((ours - out.float()).norm() / out.float().norm()).item()
            got = peer_backward()
            for g, mine in zip(got, ("dq", "dk", "dv", "dbias")):
                theirs = g.float() if mine == "dbias" else g.transpose(1, 2).float()
                if mine in tensors:
                    row[f"off {name} {mine}"] = ((tensors[mine].float() - theirs).norm() / theirs.norm()).item()
        except RuntimeError as error:
            row[f"why not {name}"] = str(error).split("\n")[0][:80]
            forwards.pop(name, None)
            backward.pop(name, None)
    row["forward"], _ = turns(forwards, burst, rounds)
    row["backward"], _ = turns(backward, burst, rounds)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--json")
    parser.add_argument("--before")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--burst", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    library = Fulgur(options.library)
    before = Fulgur(options.before) if options.before else None
    peers = {name: PEERS[name] for name in options.peers.split(",") if name}
    generator = torch.Generator(DEVICE)
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for d in map(int, options.dims.split(",")):
            for s in map(int, options.lengths.split(",")):
                case = Case(TOKENS // s, s, HIDDEN // d, d, d, False)
                for kind in options.kinds.split(","):
                    row = measure(library, case, kind, generator, options.burst, options.rounds, before, peers)
                    rows.append(row)
                    rates = {which: {n: round(case.flops(which == "backward") / t / 1e9) for n, t in row[which].items()}
                             for which in ("forward", "backward")}
                    if kind != "plain":
                        rates["of plain"] = [round(row[which]["plain"] / row[which]["fulgur"], 3)
                                             for which in ("forward", "backward")]
                    off = {k[4:]: f"{x:.1e}" for k, x in row.items() if k.startswith("off")}
                    why = [x for k, x in row.items() if k.startswith("why")]
                    print(f"d {d} S {s} {kind:12}", rates, off, *why, flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "rows": rows}, file)


if __name__ == "__main__":
    main()
