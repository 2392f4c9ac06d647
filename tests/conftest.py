"""Slow tests: `--slow SEED` runs an eighth of those that are marked `slow`, another one with each seed."""

import random

SHARE = 8


def pytest_addoption(parser):
    parser.addoption("--slow", type=int, metavar="SEED", help="run 1 of %d slow tests, drawn by SEED" % SHARE)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes some seconds; `--slow SEED` runs a sample of these")


def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--slow")
    if seed is None:
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    drawn = set(random.Random(seed).sample(slow, -(-len(slow) // SHARE)))
    left_out = [item for item in items if item.nodeid in slow and item.nodeid not in drawn]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
