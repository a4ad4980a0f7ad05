"""A training step with data parallelism: compute, and as much of the allreduces as it cannot hide.

A step computes forward and backward, micro-batch by micro-batch. In the last backward gradients
become final, layer by layer; they are cut in buckets, and a bucket's allreduce can start when all
of it is final. One allreduce runs at a time, in the order of the buckets. What the last of them
ends after the end of the backward is exposed: the step is longer by so much.

How long an allreduce takes is asked of a function, so that this file knows nothing of networks.
Parallelism inside a node, as of tensors, is part of how fast that node computes; pipelines over
nodes are not modelled. Nor is it modelled that an allreduce slows down the compute beside it.

Imports `errors`. Invariant: no step is shorter than its compute, and none longer than its compute
and all of its allreduces one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: ``allreduce_s(nbytes)``: seconds that an allreduce of so many bytes takes.
AllreduceTime = Callable[[int], float]

#: Of the compute of a step the backward is two thirds: gradients of inputs and of weights.
_BACKWARD = 2 / 3


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one step computes and what it reduces.

    Parameters
    ----------
    compute_s : float
        Seconds of forward and backward of all micro-batches.
    gradient_nbytes : int
        Bytes every member of the allreduce has of gradients.
    bucket_nbytes : int
        Bytes of a bucket; the last one may be smaller. 0: one bucket, so that nothing overlaps.
    nmicrobatches : int
        Of equal size; gradients become final in the backward of the last one.

    Raises
    ------
    InvalidArgument
        A value that is negative, or no micro-batch.
    """

    compute_s: float
    gradient_nbytes: int
    bucket_nbytes: int = 0
    nmicrobatches: int = 1

    def __post_init__(self) -> None:
        for name in ("compute_s", "gradient_nbytes", "bucket_nbytes"):
            if not getattr(self, name) >= 0:
                raise _wrong(name, getattr(self, name), "0 or more")
        if self.nmicrobatches < 1:
            raise _wrong("nmicrobatches", self.nmicrobatches, "1 or more")

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of each bucket, in the order in which they become final."""
        size = self.bucket_nbytes or self.gradient_nbytes
        starts = range(0, self.gradient_nbytes, max(1, size))
        return tuple(min(size, self.gradient_nbytes - start) for start in starts)


class TrainingStep(NamedTuple):
    """What a step takes.

    Attributes
    ----------
    compute_s : float
    communication_s : float
        Of all allreduces, hidden or not.
    exposed_s : float
        What of them the compute does not hide.
    """

    compute_s: float
    communication_s: float
    exposed_s: float

    @property
    def time_s(self) -> float:
        """Seconds from the beginning to the last gradient's end."""
        return self.compute_s + self.exposed_s


def step(job: TrainingJob, allreduce_s: AllreduceTime) -> TrainingStep:
    """Run one step.

    Parameters
    ----------
    job : TrainingJob
    allreduce_s : callable
        Asked once for every bucket.

    Examples
    --------
    Of three buckets that take 2 s each, the first is final after a third of a backward of 6 s:

    >>> step(TrainingJob(compute_s=9.0, gradient_nbytes=3, bucket_nbytes=1), lambda nbytes: 2.0)
    TrainingStep(compute_s=9.0, communication_s=6.0, exposed_s=2.0)
    """
    backward_s = _BACKWARD * job.compute_s / job.nmicrobatches
    final_nbytes, free_s, total_s = 0, 0.0, 0.0
    for nbytes in job.buckets:
        final_nbytes += nbytes
        # The last bucket is final when the backward ends, to the last bit.
        left = 1 - final_nbytes / job.gradient_nbytes
        final_s = job.compute_s - left * backward_s
        taken_s = allreduce_s(nbytes)
        free_s = max(free_s, final_s) + taken_s
        total_s += taken_s
    return TrainingStep(job.compute_s, total_s, max(0.0, free_s - job.compute_s))


def compute_s(nparameters: float, ntokens: int, flops_per_s: float) -> float:
    """Return the seconds of forward and backward: 6 operations a parameter and token.

    Parameters
    ----------
    nparameters : float
    ntokens : int
        Of the whole batch.
    flops_per_s : float
        Of all processors together, as sustained in training.

    Raises
    ------
    InvalidArgument
        A rate that is not above 0.

    References
    ----------
    Kaplan et al., "Scaling laws for neural language models", arXiv:2001.08361, 2020, section 2.1.
    """
    if not flops_per_s > 0:
        raise _wrong("flops_per_s", flops_per_s, "above 0")
    return 6 * nparameters * ntokens / flops_per_s


def _wrong(name: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"training: {name}={value}; allowed is {allowed}")


__all__ = ["AllreduceTime", "TrainingJob", "TrainingStep", "compute_s", "step"]
