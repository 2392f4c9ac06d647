"""Folders with inputs, and environments with a GPU, real or fake."""

import os
import pathlib
import re

import pytest

pytest.register_assert_rewrite("program", "attention")

from program import PROGRAM, fulgur, has_cuda, save, tensors  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, tensors())
    return tmp_path


@pytest.fixture
def on_gpu(tmp_path):
    """An environment with a cache folder of its own and a GPU, or the fake one of the C++ tests, whose kernels do
    nothing: a compiler that makes nothing of them does."""
    env = {**os.environ, "FULGUR_CACHE_DIR": str(tmp_path / "cache")}
    if not has_cuda():
        fake = str(pathlib.Path(PROGRAM).resolve().parents[2] / "tests/fake_cuda")
        env |= {"LD_LIBRARY_PATH": fake, "CUDA_HOME": fake}
        assert re.search(r"^cuda +available", fulgur("devices", env=env).stdout, re.M)
    return env


@pytest.fixture
def with_nvrtc(on_gpu):
    """The same with this machine's compiler of kernels."""
    env = {**on_gpu, "CUDA_HOME": os.environ.get("CUDA_HOME", "")}
    if not re.search(r"^cuda +available", fulgur("devices", env=env).stdout, re.M):
        pytest.skip("no NVRTC")
    return env
