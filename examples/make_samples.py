"""Writes the sample tensors q.npy, k.npy, v.npy, dout.npy with this file.

Attention of 512 positions, 8 query heads that share 2 key/value heads, 64 dimensions, float16.
"""

import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
SHAPES = {
    "q": (1, 512, 8, 64),
    "k": (1, 512, 2, 64),
    "v": (1, 512, 2, 64),
    "dout": (1, 512, 8, 64),
}

rng = np.random.Generator(np.random.Philox(1))
for name, shape in SHAPES.items():
    np.save(HERE / f"{name}.npy", rng.standard_normal(shape, dtype=np.float32).astype(np.float16))
