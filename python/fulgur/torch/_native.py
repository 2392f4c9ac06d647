"""What is compiled against the PyTorch that is there, if the user wants that: its Python functions take longer."""

import os
import pathlib

import torch


def load():
    """The module of _native.cpp, compiled the first time; None unless FULGUR_TORCH_BUILD is 1."""
    if os.environ.get("FULGUR_TORCH_BUILD") != "1":
        return None
    from torch.utils import cpp_extension

    source = pathlib.Path(__file__).with_suffix(".cpp")
    version = torch.__version__.translate(str.maketrans(".+", "__"))  # its modules do not go with another one
    return cpp_extension.load(f"fulgur_native_{version}", [str(source)], extra_cflags=["-O2", "-std=c++20"])
