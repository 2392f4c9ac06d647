"""Processes that compute together."""

import os
import socket
import subprocess
import sys


def run_ranks(script, size):
    """What processes of so many ranks print, each of which must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **names, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=300) for process in ranks]
    for process, (_, errors) in zip(ranks, outputs):
        assert process.returncode == 0, errors
    return [output for output, _ in outputs]
