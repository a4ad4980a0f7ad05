"""Exhaustion of this process's file descriptors, as in a job with too many connections."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptor_left(spare: int = 0) -> Iterator[None]:
    """Lower the limit of this process to the descriptors below the lowest free one.

    Parameters
    ----------
    spare : int
        Descriptors that can still be opened, provided all above the lowest free one are free.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
