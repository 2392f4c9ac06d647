"""Errors of gradients in bf16, against float64: fulgur's, FlashAttention-3's, and a plain formula's in bf16.

`normal` data is from the standard normal distribution. `outliers` are the same, but the first and the middle one of the
d coordinates of every key and every value are scaled by 20, as a few channels of trained models are.
"""

import torch
from gpu_case import DEVICE, Case, inputs

DIMS, LENGTHS, HEADS = (64, 128, 256), (1024, 8192), 2
OUTLIERS = 20
GRADIENTS = ("dq", "dk", "dv")


def with_outliers(tensors, d):
    scales = torch.ones(d, device=DEVICE, dtype=torch.bfloat16)
    scales[[0, d // 2]] = OUTLIERS
    return tensors | {name: tensors[name] * scales for name in ("k", "v")}


def plain(tensors, causal, dtype):
    """dq, dk and dv by the formulas, head by head; every step is rounded to `dtype`."""
    batch, s, heads, d = tensors["q"].shape
    grads = [torch.empty(tensors[name].shape, device=DEVICE, dtype=dtype) for name in ("q", "k", "v")]
    hidden = torch.ones(s, s, device=DEVICE, dtype=torch.bool).triu(1) if causal else None
    for b in range(batch):
        for h in range(heads):
            q, k, v, dout = (tensors[name][b, :, h].to(dtype) for name in ("q", "k", "v", "dout"))
            scores = q @ k.T * d**-0.5
            if causal:
                scores.masked_fill_(hidden, float("-inf"))
            p = scores.softmax(-1)
            dp = dout @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * d**-0.5
            for grad, value in zip(grads, (ds @ k, ds.T @ q, p.T @ dout)):
                grad[b, :, h] = value
    return grads


def rms(x):
    return x.double().square().mean().sqrt().item()


def error_row(fulgur, flash3, data, case, generator):
    """`flash3`: the peer (gpu_peers.py), or None."""
    tensors = inputs(case, generator)
    if data == "outliers":
        tensors = with_outliers(tensors, case.d)
    want = plain(tensors, case.causal, torch.float64)
    forward, results = fulgur.prepared("forward", case, tensors)
    forward()
    backward, grads = fulgur.prepared("backward", case, tensors | results)
    backward()
    got = {"fulgur": [grads[name] for name in GRADIENTS], "naive": plain(tensors, case.causal, torch.bfloat16)}
    if flash3:
        got["flash3"] = flash3(case, tensors)()

    def by_name(values):
        return dict(zip(GRADIENTS, values))

    row = {"data": data, "d": case.d, "s": case.s, "causal": case.causal, "reference": by_name(map(rms, want))}
    row["rms_error"] = {who: by_name(rms(x.double() - w) for x, w in zip(values, want)) for who, values in got.items()}
    shares = ", ".join(f"{who} {' '.join(f'{e:.2e}' for e in errors.values())}"
                       for who, errors in row["rms_error"].items())
    print(f"{data} {case}: RMS errors of dQ, dK, dV: {shares}", flush=True)
    return row


def cases():
    return [Case(1, s, HEADS, d, d, causal) for d in DIMS for s in LENGTHS for causal in (False, True)]


def error_rows(fulgur, flash3, generator):
    return [error_row(fulgur, flash3, data, case, generator) for data in ("normal", "outliers") for case in cases()]
