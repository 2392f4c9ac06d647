"""Random expressions as Python, which fulgur traces and array libraries compute, and attention by them written out."""

import re

import numpy as np

# What a source has: places, functions, and tensors [batch, key], [head, distance] and [query].
TENSORS = {"doc": ((2, 40), "int"), "table": ((4, 13), "float"), "gate": ((37,), "float")}


PLACES = ("b", "h", "hk", "q", "k", "sq", "sk", "q0", "delta")


def _of_a_place(source):
    """Itself, or a key where it is a number, which Python computes by itself."""
    return source if re.search(r"\b(b|h|hk|q|k|sq|delta|doc)\b", source) else "k"


class Sources:
    """Random sources of typed expressions whose values stay small. `smooth`: none jumps where rounding may decide."""

    def __init__(self, seed, smooth):
        self.random, self.smooth = np.random.default_rng(seed), smooth

    def _one(self, *makers):
        return makers[self.random.integers(len(makers))]()

    def number(self, depth):
        if depth <= 0:
            literal = f"{self.random.integers(-32, 32) / 16}"
            return self._one(
                lambda: "score", lambda: "score", lambda: literal,
                lambda: f"table[h, {_of_a_place(self.integer(1))}]", lambda: f"gate[{_of_a_place(self.integer(0))}]",
            )  # fmt: skip
        more = lambda: self.number(depth - 1)  # noqa: E731
        smooth = [
            lambda: f"({more()} + {more()})", lambda: f"({more()} - {more()})",
            lambda: f"({more()} * {self.bounded(depth - 1)})", lambda: f"({more()} / (1 + abs({more()})))",
            lambda: f"where({self.condition(depth - 1)}, {more()}, {more()})", lambda: f"maximum({more()}, {more()})",
            lambda: f"minimum({more()}, {more()})", lambda: f"clip({more()}, -1.5, 2.0)",
            lambda: f"(sqrt(1 + abs({more()})) - log(2 + abs({more()})))",
            lambda: f"({self.integer(depth - 1)} * 0.125)",
            lambda: f"-{more()}", lambda: self.bounded(depth - 1),
        ]  # fmt: skip
        return self._one(*smooth) if self.smooth else self._one(*smooth, lambda: f"floor({more()})")

    def bounded(self, depth):
        x = self.number(depth)
        return self._one(
            lambda: f"sigmoid({x})", lambda: f"sin({x})", lambda: f"cos({x})", lambda: f"erf({x})",
            lambda: f"exp(-abs({x}))", lambda: f"exp2(-abs({x}))", lambda: f"rsqrt(1 + ({x})**2)", lambda: f"tanh({x})",
        )  # fmt: skip

    def integer_leaf(self):
        leaves = (self.random.integers(-8, 32), "b", "h", "(hk + q0)", "(sk - sq)", "delta", "q", "k")
        return self._one(*(lambda x=x: f"{x}" for x in (*leaves, "doc[b, q]", "doc[b, k]")))

    def integer(self, depth):
        if depth <= 0:
            return self.integer_leaf()
        x, more, n = self.integer(depth - 1), lambda: self.integer(depth - 1), self.random.integers(1, 10)
        return self._one(
            lambda: f"({x} + {more()})", lambda: f"({x} - {more()})", lambda: f"({x} // {n})", lambda: f"({x} % {n})",
            lambda: f"abs({x})", lambda: f"minimum({x}, {more()})", lambda: f"(({x} & 15) ^ 5)",
            lambda: f"(({x} >> 1) | 8)", lambda: f"({x} * {n})", lambda: f"(~{x})",
        )  # fmt: skip

    def condition(self, depth):
        x, y = _of_a_place(self.integer(depth - 1)), self.integer(depth - 1)
        more = lambda: self.condition(depth - 1)  # noqa: E731
        compares = [lambda op=op: f"({x} {op} {y})" for op in ("==", "!=", "<", "<=", ">", ">=")]
        compares.append(lambda: f"bit({x}, 1)")
        logic = [lambda: f"({more()} & {more()})", lambda: f"({more()} | {more()})", lambda: f"~{more()}"]
        return self._one(*compares, *(logic if depth > 0 else []))


def tensors(seed):
    """Arrays of the tensors by name."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 4, shape, np.int32) if kind == "int" else random.uniform(-2, 2, shape).astype("f4")
        for name, (shape, kind) in TENSORS.items()
    }


class Clamped:
    """An array that is indexed as expressions index tensors."""

    def __init__(self, array, clamp):
        self.array, self.clamp = array, clamp

    def __getitem__(self, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        return self.array[tuple(self.clamp(i, n) for i, n in zip(indices, self.array.shape))]


def places(batch, hq, hk, sq, sk, arange):
    """The places of every score, broadcast over (batch, hq, sq, sk)."""
    b, h = arange(batch)[:, None, None, None], arange(hq)[:, None, None]
    q, k = arange(sq)[:, None], arange(sk)
    sizes = {name: arange(n + 1)[-1] for name, n in (("sq", sq), ("sk", sk), ("q0", 0))}
    return dict(b=b, h=h, hk=h // (hq // hk), q=q, k=k, **sizes, delta=k - q - (sk - sq))


def function(source, names, functions):
    """A function of parameters with these names, computed by these functions."""
    return eval(f"lambda {', '.join(names)}: {source}", dict(functions))  # noqa: S307
