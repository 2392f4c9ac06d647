#!/usr/bin/env python3
"""Serves requests by continuous batching, with a tiny transformer and caches of pages.

    examples/serve.py
    examples/serve.py --requests 40 --pages 30 --page 4 --budget 24
    examples/serve.py --device cuda

The model is a transformer of random weights: rotary positions, four query heads on two heads of
keys. It is computed by NumPy, or with --device by PyTorch, where the caches are float16, as GPUs
want them. Requests come and go. Each step takes one token of every request that is decoding, and
fills up to its budget with the next chunks of prompts, all in one packed batch:

    fulgur.append      writes the new keys and values into pages, and turns keys and queries
    fulgur.attention   lets each query see its own sequence, through the page table

A request that is done gives its pages back, and the next one takes them as they are. In the end the
tokens of each request are compared with those of a dense forward pass in plain NumPy, in float64.
"""

import argparse
import collections
import dataclasses
import functools
import sys

import numpy as np

import fulgur

LAYERS, VOCABULARY, HIDDEN, HQ, HK, D = 2, 96, 64, 4, 2, 16
LONGEST = 256  # positions that the model knows


class Model:
    """Weights, and a forward pass that leaves attention to its caller.

    ``asarray`` is that of NumPy or of PyTorch and says where the weights are, and in which
    precision. All else here is spelled alike in both.
    """

    def __init__(self, seed, asarray):
        rng, self.asarray = np.random.default_rng(seed), asarray

        def normal(*shape):
            return rng.standard_normal(shape, np.float32)

        def matrix(rows, columns):
            return asarray(normal(rows, columns) / np.float32(rows**0.5))

        self.embedding = asarray(normal(VOCABULARY, HIDDEN))
        self.layers = [
            {
                "q": matrix(HIDDEN, HQ * D),
                "k": matrix(HIDDEN, HK * D),
                "v": matrix(HIDDEN, HK * D),
                "o": matrix(HQ * D, HIDDEN),
                "up": matrix(HIDDEN, 2 * HIDDEN),
                "down": matrix(2 * HIDDEN, HIDDEN),
            }
            for _ in range(LAYERS)
        ]
        self.head = matrix(HIDDEN, VOCABULARY)
        angles = np.arange(LONGEST)[:, None] * 10000.0 ** -np.linspace(0, 1, D // 2, False)
        self.cos, self.sin = (asarray(f(angles, dtype=np.float32)) for f in (np.cos, np.sin))

    def logits(self, tokens, attend):
        """Of a list of packed tokens; attend(layer, q, k, v) gives (total, HQ, D)."""

        def normed(x):
            return x * ((x * x).mean(-1, keepdims=True) + 1e-6) ** -0.5

        x = self.embedding[tokens]
        for layer, w in enumerate(self.layers):
            h = normed(x)
            q, k, v = ((h @ w[name]).reshape(len(tokens), -1, D) for name in "qkv")
            x = x + attend(layer, q, k, v).reshape(len(tokens), -1) @ w["o"]
            x = x + (normed(x) @ w["up"]).clip(0) @ w["down"]
        return normed(x) @ self.head


@dataclasses.dataclass
class Request:
    number: int
    arrives: int  # at this step
    tokens: list  # the prompt, then what was generated
    prompt: int
    wanted: int
    cached: int = 0  # tokens whose keys and values are in the pages
    pages: list = dataclasses.field(default_factory=list)

    def done(self):
        return len(self.tokens) == self.prompt + self.wanted


class Server:
    def __init__(self, model, pages, page, budget, precision):
        self.model, self.page, self.budget = model, page, budget
        # NaN where nothing was written: what is read by mistake shows.
        nothing = np.full((LAYERS, pages, page, HK, D), np.nan, precision)
        self.k_cache, self.v_cache = model.asarray(nothing), model.asarray(nothing.copy())
        self.free = list(range(pages))
        self.waiting, self.running = collections.deque(), []

    def pages_of(self, request):
        """Of its whole life: the last token that it generates needs no place."""
        return -(-(request.prompt + request.wanted - 1) // self.page)

    def admit(self):
        """Requests start in order, each when there are pages for all of it."""
        while self.waiting and self.pages_of(self.waiting[0]) <= len(self.free):
            request = self.waiting.popleft()
            count = self.pages_of(request)
            request.pages, self.free = self.free[:count], self.free[count:]
            self.running.append(request)

    def chunks(self):
        """(request, new tokens) of this step: first those that decode, one token each."""
        left, chosen = self.budget, []
        for request in sorted(self.running, key=lambda r: r.cached < r.prompt):
            new = min(left, len(request.tokens) - request.cached)
            if new > 0:
                chosen.append((request, new))
                left -= new
        return chosen

    def step(self):
        """Computes one batch; the requests that it finished."""
        self.admit()
        chosen = self.chunks()
        if not chosen:
            return [], chosen
        requests, new = zip(*chosen)
        tokens = [token for r, n in chosen for token in r.tokens[r.cached : r.cached + n]]
        ends = np.cumsum([0, *new], dtype=np.int32)
        lengths = np.array([r.cached for r in requests], np.int32)
        used = lengths + np.array(new, np.int32)
        # A row of ids for each sequence; -1 stands after its last page.
        table = np.full((len(requests), max(len(r.pages) for r in requests)), -1, np.int32)
        for row, request in zip(table, requests):
            row[: len(request.pages)] = request.pages

        last = (ends[1:] - 1).tolist()
        asarray = self.model.asarray
        table = asarray(table)  # lengths stay on the host

        def attend(layer, *qkv):
            caches = self.k_cache[layer], self.v_cache[layer]
            q, k, v = (asarray(x, dtype=caches[0].dtype) for x in qkv)
            q = fulgur.append(
                *caches, k, v, lengths, cu_seqlens_k_new=ends, page_table=table,
                cos=self.model.cos, sin=self.model.sin, q=q, cu_seqlens_q=ends, causal=True,
            )  # fmt: skip
            out = fulgur.attention(
                q, *caches, cu_seqlens_q=ends, max_seqlen_q=max(new), page_table=table,
                seqused_k=used, causal=True,
            )  # fmt: skip
            return asarray(out, dtype=qkv[0].dtype)

        best = self.model.logits(tokens, attend)[last].argmax(-1).tolist()
        for (request, n), token in zip(chosen, best):
            request.cached += n
            if request.cached == len(request.tokens):  # else there is more of the prompt
                request.tokens.append(token)
        finished = [request for request in self.running if request.done()]
        for request in finished:
            self.running.remove(request)
            self.free += request.pages
        return finished, chosen


def dense(model, request, precision):
    """Logits of the tokens that were generated, by the formulas in NumPy; attention is rounded
    wherever one that computes in this precision rounds."""

    def rounded(x):
        return x.astype(precision).astype(x.dtype)

    def turned(x):
        cos, sin = model.cos[: len(x), None], model.sin[: len(x), None]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return rounded(np.concatenate([a * cos - b * sin, a * sin + b * cos], -1))

    def attend(_, *qkv):
        q, k, v = map(rounded, qkv)
        k, v = (np.repeat(x, HQ // HK, 1) for x in (turned(k), v))
        scores = np.einsum("ihd,jhd->hij", turned(q), k) / D**0.5
        scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = rounded(weights / weights.sum(-1, keepdims=True))
        return rounded(np.einsum("hij,jhd->ihd", weights, v))

    return model.logits(request.tokens[:-1], attend)[request.prompt - 1 :]


def check(seed, requests, precision):
    """Compares all tokens with dense attention; returns how many there are, and for how many of
    them rounding decides.

    A logit may be off by twice what the formulas in the server's precision are off anywhere. So a
    token is right if its exact logit is as close to the best one as two such errors, and in no
    doubt if no other is.
    """
    exact = Model(seed, functools.partial(np.asarray, dtype=np.float64))
    want = [dense(exact, request, np.float64) for request in requests]
    plain = Model(seed, np.asarray)
    off = [abs(dense(plain, r, precision) - logits).max() for r, logits in zip(requests, want)]
    margin = 2 * 2 * max(off)
    doubtful = 0
    for request, logits in zip(requests, want):
        got, best = request.tokens[request.prompt :], logits.argmax(-1)
        close = logits >= logits.max(-1, keepdims=True) - margin
        if not close[range(len(got)), got].all():
            sys.exit(f"request {request.number}: got the tokens {got}, dense attention gives {best.tolist()}")
        doubtful += (close.sum(-1) > 1).sum()
    return sum(map(len, want)), doubtful


def make_requests(rng, count):
    requests, step = [], 0
    for number in range(count):
        step += int(rng.integers(0, 4))
        prompt, wanted = int(rng.integers(1, 40)), int(rng.integers(1, 16))
        tokens = rng.integers(0, VOCABULARY, prompt).tolist()
        requests.append(Request(number, step, tokens, prompt, wanted))
    return requests


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--page", type=int, default=8, help="tokens of a page")
    parser.add_argument("--budget", type=int, default=20, help="new tokens of a step, all requests together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="compute with PyTorch on this; default NumPy")
    options = parser.parse_args()
    for name in ("requests", "pages", "page", "budget"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, want at least 1")
    asarray, precision = np.asarray, np.float32
    if options.device:
        try:
            import torch
        except ImportError:
            parser.error(f"--device: got {options.device}, want PyTorch to be installed")
        if options.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device: got cuda, want a GPU that PyTorch sees")
        asarray, precision = functools.partial(torch.asarray, device=options.device), np.float16
    model = Model(options.seed, asarray)
    server = Server(model, options.pages, options.page, options.budget, precision)
    requests = make_requests(np.random.default_rng(options.seed), options.requests)
    most = max(map(server.pages_of, requests))
    if most > options.pages:
        parser.error(f"--pages: got {options.pages}, want at least the {most} of the longest request")

    to_come, done, step, taken, mixed = collections.deque(requests), 0, 0, 0, 0
    print("step  running  waiting  decoding  tokens of prompts  free pages  finished")
    while done < len(requests):
        while to_come and to_come[0].arrives <= step:
            server.waiting.append(to_come.popleft())
        finished, chosen = server.step()
        prompts = sum(n for r, n in chosen if r.cached <= r.prompt)
        decoding = sum(r.cached > r.prompt for r, _ in chosen)
        mixed += prompts > 0 and decoding > 0
        taken += sum(len(r.pages) for r in finished)
        done += len(finished)
        numbers = ", ".join(str(r.number) for r in finished)
        print(
            f"{step:4}  {len(server.running) + len(finished):7}  {len(server.waiting):7}  {decoding:8}  "
            f"{prompts:17}  {len(server.free):10}  {numbers}"
        )
        step += 1

    assert sorted(server.free) == list(range(options.pages))
    generated, doubtful = check(options.seed, requests, precision)
    print(
        f"{len(requests)} requests, {generated} tokens in {step} steps, {mixed} of which had prompts and decoding; "
        f"{options.pages} pages were taken {taken} times.\n{generated - doubtful} tokens are those of dense attention; "
        f"at the other {doubtful} the best logits there are closer than {np.dtype(precision).name} tells apart."
    )


if __name__ == "__main__":
    main()
