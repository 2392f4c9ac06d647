"""The interface of flash-attn 2.8, computed by fulgur, on the CPU and on CUDA.

Functions, arguments, defaults and results are those of the package ``flash_attn``; what fulgur does
not have raises NotImplementedError. :func:`fulgur.install_as` lets ``import flash_attn`` find it.
What differs: log-sum-exps of rows that see no key are -inf, and with causal ALiBi they are those of
the bias that the contract says; see docs/python.md.
"""

from fulgur.flash_attn import bert_padding, flash_attn_interface, layers
from fulgur.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4"  # of the interface

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "layers",
]
