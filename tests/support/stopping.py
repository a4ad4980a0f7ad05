"""A process that another one stops and continues."""

import os
import random
import signal
import time
from collections.abc import Callable


def stop_for_a_second() -> Callable[[], bool]:
    """Have a forked child stop this process in 0.05 s, and continue it 1 s later.

    Return a function that returns whether the process has been continued.
    """
    child = os.fork()
    if not child:
        pid = os.getppid()
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    ended: list[int] = []

    def is_over() -> bool:
        if not ended and os.waitpid(child, os.WNOHANG)[0]:
            ended.append(child)
        return bool(ended)

    return is_over


def stop_at_random(ntimes: int, seed: int) -> None:
    """Have a forked child stop this process `ntimes` times, at random, for up to 0.1 s each."""
    pid = os.getpid()
    if not os.fork():
        rng = random.Random(seed)
        for _ in range(ntimes):
            time.sleep(rng.uniform(0.0, 0.2))
            if os.getppid() != pid:
                break
            os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
