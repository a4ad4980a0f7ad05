"""Time of a data-parallel training step: compute plus the exposed part of the allreduces.

A step computes a forward and a backward pass for each micro-batch. During the last backward pass
the gradients become final at a constant rate. The gradients are divided into buckets; the allreduce
of a bucket can start when the whole bucket is final. Allreduces run one at a time, in the order of
the buckets. The time from the end of the last backward pass to the end of the last allreduce is
exposed: it makes the step longer.

The caller passes a function that returns the time of an allreduce. Parallelism inside a node, such
as tensor parallelism, is part of the compute time. Pipeline parallelism over nodes is not modeled,
nor is the slowdown of compute by a concurrent allreduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument

#: ``allreduce_s(nbytes)`` returns the seconds that an allreduce of `nbytes` bytes takes.
AllreduceTime = Callable[[int], float]

#: Share of the backward pass in a step's compute: it computes the gradients of inputs and of
#: weights, each at the cost of the forward pass.
_BACKWARD = 2 / 3


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Compute time and gradient sizes of one training step.

    Parameters
    ----------
    compute_s : float
        Seconds of the forward and backward passes of all micro-batches.
    gradient_nbytes : int
        Bytes of gradients that each rank contributes to the allreduces of one step.
    bucket_nbytes : int
        Bytes of a bucket; the last bucket may be smaller. 0: one bucket, so nothing overlaps.
    nmicrobatches : int
        Number of micro-batches, of equal size. Gradients become final in the backward pass of the
        last micro-batch.

    Raises
    ------
    InvalidArgument
        If `nmicrobatches` is below 1, or another value is negative or NaN.
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
        """Bytes of each bucket, in the order in which the buckets become final."""
        size = self.bucket_nbytes or self.gradient_nbytes
        starts = range(0, self.gradient_nbytes, max(1, size))
        return tuple(min(size, self.gradient_nbytes - start) for start in starts)


class TrainingStep(NamedTuple):
    """Time of one training step, in seconds.

    Attributes
    ----------
    compute_s : float
        Seconds of the forward and backward passes.
    communication_s : float
        Total seconds of all allreduces, hidden by compute or not.
    exposed_s : float
        Seconds of communication after the end of the backward pass.
    """

    compute_s: float
    communication_s: float
    exposed_s: float

    @property
    def time_s(self) -> float:
        """Seconds from the start of the step to the end of its last allreduce."""
        return self.compute_s + self.exposed_s


def step(job: TrainingJob, allreduce_s: AllreduceTime) -> TrainingStep:
    """Return the time of one training step.

    Parameters
    ----------
    job : TrainingJob
    allreduce_s : callable
        ``allreduce_s(nbytes)`` returns the seconds of an allreduce of `nbytes` bytes. It is called
        once per bucket.

    Examples
    --------
    The backward pass takes 6 s. Each of the three buckets becomes final 2 s after the previous one,
    and its allreduce takes 2 s:

    >>> step(TrainingJob(compute_s=9.0, gradient_nbytes=3, bucket_nbytes=1), lambda nbytes: 2.0)
    TrainingStep(compute_s=9.0, communication_s=6.0, exposed_s=2.0)
    """
    backward_s = _BACKWARD * job.compute_s / job.nmicrobatches
    final_nbytes, free_s, total_s = 0, 0.0, 0.0
    for nbytes in job.buckets:
        final_nbytes += nbytes
        # With this formula the last bucket is final at exactly `job.compute_s`.
        left = 1 - final_nbytes / job.gradient_nbytes
        final_s = job.compute_s - left * backward_s
        taken_s = allreduce_s(nbytes)
        free_s = max(free_s, final_s) + taken_s
        total_s += taken_s
    return TrainingStep(job.compute_s, total_s, max(0.0, free_s - job.compute_s))


def compute_s(nparameters: float, ntokens: int, flops_per_s: float) -> float:
    """Return the seconds of the forward and backward passes of a transformer.

    The two passes take 6 floating-point operations per parameter and token.

    Parameters
    ----------
    nparameters : float
        Number of weights.
    ntokens : int
        Number of tokens in the whole batch.
    flops_per_s : float
        Floating-point operations per second that all processors together sustain in training.

    Raises
    ------
    InvalidArgument
        If `flops_per_s` is not above 0.

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
