"""The modules that stand in for FlashAttention, under its names."""

import importlib
import sys
from collections import Counter

# The modules of this package by the names that they stand in for, parents first.
_STANDS_IN = {
    "flash_attn": {
        "flash_attn": "fulgur.flash_attn",
        "flash_attn.flash_attn_interface": "fulgur.flash_attn.flash_attn_interface",
        "flash_attn.bert_padding": "fulgur.flash_attn.bert_padding",
        "flash_attn.layers": "fulgur.flash_attn.layers",
        "flash_attn.layers.rotary": "fulgur.flash_attn.layers.rotary",
    },
    "flash_attn_interface": {"flash_attn_interface": "fulgur.flash_attn_interface"},
    "flash_attn.cute": {
        "flash_attn.cute": "fulgur.flash_attn_cute",
        "flash_attn.cute.interface": "fulgur.flash_attn_cute.interface",
    },
}

# How many installations that are not taken back hold each of these names.
_held = Counter()


def install_as(name):
    """Lets ``import`` find fulgur where programs look for FlashAttention, in this process.

    Args:
        name: "flash_attn" (flash-attn 2: :mod:`fulgur.flash_attn`), "flash_attn_interface"
            (FlashAttention-3: :mod:`fulgur.flash_attn_interface`) or "flash_attn.cute"
            (FlashAttention-4: :mod:`fulgur.flash_attn_cute`).

    Returns:
        A function of no arguments that takes it back. Calls may be nested: the name is fulgur's until
        each of them is taken back, in any order; taking one back twice changes nothing.

    Raises:
        ValueError: another name.
        RuntimeError: a module of that name is imported already.

    >>> import fulgur
    >>> undo = fulgur.install_as("flash_attn")
    >>> import flash_attn
    >>> flash_attn.flash_attn_func.__module__
    'fulgur.flash_attn.flash_attn_interface'
    >>> undo()
    """
    if name not in _STANDS_IN:
        raise ValueError(f"name: got {name!r}, want one of {', '.join(map(repr, _STANDS_IN))}")
    modules = {
        alias: importlib.import_module(module) for alias, module in _STANDS_IN[name].items()
    }
    if name == "flash_attn.cute":  # its parent, without which it cannot be imported
        modules = {"flash_attn": importlib.import_module("fulgur.flash_attn"), **modules}
    taken = [x for x, module in modules.items() if sys.modules.get(x, module) is not module]
    if taken:
        raise RuntimeError(
            f"name: {taken[0]} is imported already ({sys.modules[taken[0]]}); "
            "want fulgur.install_as() to be called before"
        )
    sys.modules.update(modules)
    if name == "flash_attn.cute":
        modules["flash_attn"].cute = modules[name]
    holds = list(modules)
    _held.update(holds)

    def undo():
        while holds:
            alias = holds.pop()
            _held[alias] -= 1
            if _held[alias] > 0:
                continue
            if sys.modules.get(alias) is modules[alias]:
                del sys.modules[alias]
            if alias == "flash_attn.cute":
                del modules["flash_attn"].cute

    return undo
