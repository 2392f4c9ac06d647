"""Of flash-attn's layers, the rotary embedding."""

from fulgur.flash_attn.layers import rotary

__all__ = ["rotary"]
