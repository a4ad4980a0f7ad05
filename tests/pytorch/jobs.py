"""Jobs of ranks that use torch.distributed, on this machine."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


#: Ports that the kernel does not give to other sockets, which could take the port of a store before
#: rank 0, which imports torch first, listens on it.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Return a port on which nobody listens now."""
    while True:
        port = random.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start(
    argv: Sequence[str | Path], nranks: int = 2, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start a Python program on every rank, with the variables that torchrun sets."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    shared = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(nranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **variables,
    }
    return [
        subprocess.Popen(
            [sys.executable, *map(str, argv)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nranks)
    ]


def finish(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 100) -> list[tuple[str, str]]:
    """Wait for all ranks; return their standard output and standard error.

    If a rank does not end, kill all and fail, with what each had written and its exit status.
    """
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: rank.communicate(timeout=timeout_s), ranks))
    except subprocess.TimeoutExpired as exc:
        statuses = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
        written = [rank.communicate() for rank in ranks]
        said = zip(statuses, written, strict=True)
        raise AssertionError(
            f"after {timeout_s} s: "
            + "; ".join(
                f"rank {number}: status {status}, {texts}"
                for number, (status, texts) in enumerate(said)
            )
        ) from exc
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()


def run(argv: Sequence[str | Path], nranks: int = 2, **variables: str) -> list[str]:
    """Run a Python program that must succeed on every rank; return their standard output."""
    ranks = start(argv, nranks, **variables)
    written = finish(ranks)
    for rank, (_, errors) in zip(ranks, written, strict=True):
        assert rank.returncode == 0, errors
    return [out for out, _ in written]
