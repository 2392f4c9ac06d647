"""The interface of FlashAttention-4 (``flash_attn.cute``), computed by fulgur.

Functions, arguments, defaults and results are upstream's; what fulgur does not have raises
NotImplementedError. ``num_splits``, ``pack_gqa`` and the scheduler's arguments are hints about
upstream's kernels, and taken whatever they say. :func:`fulgur.install_as` lets ``import
flash_attn.cute`` find this package.
"""

from fulgur.flash_attn_cute.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
)

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]
