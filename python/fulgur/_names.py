"""Errors in the words of callers whose arguments have other names than fulgur's."""

import re

# What FlashAttention's interfaces call options, by what errors call them.
OPTIONS = {
    "scale": "softmax_scale", "window_left": "window_size", "window_right": "window_size",
    "chunk": "attention_chunk", "sinks": "learnable_sink",
}  # fmt: skip
# The same of the private functions.
PRIVATE = OPTIONS | {"window_left": "window_size_left", "window_right": "window_size_right"}


def named(names, call, *args, **kwargs):
    """What `call` returns; where it finds an argument wrong, the error says `names` of arguments, the
    caller's by fulgur's."""
    try:
        return call(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # Fulgur's own errors speak of arguments alone; PyTorch's, of a wrong kind, quote one.
        fulgurs = re.match(r"[\w.]+(, \w+)*: ", str(error))
        place = rf"(?<![\w.])({words})(?!\w)" if fulgurs else rf"(?<=for argument ')({words})(?=')"
        said = re.sub(place, lambda word: names[word[0]], str(error))
        if said != str(error):
            error.args = (said,)
        raise
