"""A process that another one stops and continues."""

import os
import signal
import time


def stop_for_a_second() -> None:
    """Have a forked child stop this process in 0.05 s, and continue it 1 s later."""
    if not os.fork():
        pid = os.getppid()
        time.sleep(0.05)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
