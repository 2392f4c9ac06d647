"""Fixtures of the tests of fulgur.torch."""

import pytest


@pytest.fixture
def fresh_torch():
    """The same random numbers in every test, and no graph of another one."""
    import torch

    torch.manual_seed(0)
    torch.compiler.reset()


@pytest.fixture
def one_thread():
    """One thread of PyTorch: waking a second one takes longer than small work."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
