"""Latency model of transformer inference with tensor parallelism over several nodes.

Every layer has two allreduces of the activations of all tokens in the batch, one after attention
and one after the feed-forward part. They do not overlap with compute. In the *prefill* the batch
consists of all tokens of the prompts, and the compute time follows from the number of operations.
In a *decode* step the batch consists of one token per sequence. Its compute time is the larger of
two times: the time of the operations, and the time to read all weights and the keys and values of
all earlier tokens from memory.

The caller passes a function that returns the time of an allreduce. Request queues, continuous
batching and pipeline parallelism are not modeled.

References
----------
Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism", arXiv:1909.08053, 2019: two allreduces per layer in the forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.training import AllreduceTime

_ALLREDUCES_PER_LAYER = 2


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the transformer that is served.

    Parameters
    ----------
    nparameters : float
        Number of weights.
    nlayers : int
        Number of layers.
    hidden : int
        Number of elements of one token's activations.
    kv_heads : int
        Number of heads with cached keys and values.
    head_size : int
        Number of elements of one head's key, and of its value, per token.
    itemsize : int
        Bytes of one element of weights, activations, keys and values.

    Raises
    ------
    InvalidArgument
        If a value is not above 0.
    """

    nparameters: float
    nlayers: int
    hidden: int
    kv_heads: int
    head_size: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        _require_positive(self)

    def activation_nbytes(self, ntokens: int) -> int:
        """Return the number of bytes of one allreduce of the activations of `ntokens` tokens."""
        return ntokens * self.hidden * self.itemsize


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Processors of a server; every layer of the model is split over all of them.

    Parameters
    ----------
    nprocessors : int
        Number of processors.
    flops_per_s : float
        Floating-point operations per second that one processor sustains.
    memory_bytes_per_s : float
        Bytes per second that one processor reads from its memory; only decode steps depend on it.

    Raises
    ------
    InvalidArgument
        If a value is not above 0.
    """

    nprocessors: int
    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self)


class ServingPhase(NamedTuple):
    """Time of a prefill or of one decode step, in seconds."""

    compute_s: float
    communication_s: float

    @property
    def time_s(self) -> float:
        """Total time in seconds: compute, then communication."""
        return self.compute_s + self.communication_s


class Latency(NamedTuple):
    """Latency of one request.

    Attributes
    ----------
    ttft_s : float
        Seconds until the first token.
    tpot_s : float
        Seconds from one token to the next.
    """

    ttft_s: float
    tpot_s: float


def prefill(
    model: Transformer, server: Server, nprompts: int, length: int, allreduce_s: AllreduceTime
) -> ServingPhase:
    """Return the time to process `nprompts` prompts of `length` tokens each in one batch.

    `allreduce_s` is called once, with the bytes of one allreduce; see `AllreduceTime`.

    Dense layers take two operations per parameter and token. For each pair of a token and an
    earlier token, attention takes four operations per layer and activation element: two for the
    score and two for the weighted sum.
    """
    ntokens = nprompts * length
    dense = 2 * model.nparameters * ntokens
    npairs = ntokens * length / 2
    attention = 4 * model.nlayers * model.hidden * npairs
    compute = (dense + attention) / (server.nprocessors * server.flops_per_s)
    return ServingPhase(compute, _communication_s(model, ntokens, allreduce_s))


def decode(
    model: Transformer, server: Server, nsequences: int, context: int, allreduce_s: AllreduceTime
) -> ServingPhase:
    """Return the time of one decode step: one new token for each of `nsequences` sequences.

    Each sequence has `context` earlier tokens, whose keys and values are read from memory. A step
    takes two operations per parameter and sequence; the operations of attention are neglected.
    `allreduce_s` is as for `prefill`.
    """
    weights = model.nparameters * model.itemsize / server.nprocessors
    # A head is not split: if there are more processors than heads, some hold copies.
    nholders = min(server.nprocessors, model.kv_heads)
    head = 2 * model.nlayers * model.head_size * model.itemsize
    kept = nsequences * context * model.kv_heads * head / nholders
    operations = 2 * model.nparameters * nsequences / server.nprocessors
    compute = max((weights + kept) / server.memory_bytes_per_s, operations / server.flops_per_s)
    return ServingPhase(compute, _communication_s(model, nsequences, allreduce_s))


def latency(
    model: Transformer,
    server: Server,
    *,
    length: int,
    nsequences: int,
    allreduce_s: AllreduceTime,
) -> Latency:
    """Return the latency of a request with a prompt of `length` tokens.

    The prefill processes the prompt alone. In the decode step, the request is one of `nsequences`
    sequences that all have `length` earlier tokens.
    """
    return Latency(
        prefill(model, server, 1, length, allreduce_s).time_s,
        decode(model, server, nsequences, length, allreduce_s).time_s,
    )


def _communication_s(model: Transformer, ntokens: int, allreduce_s: AllreduceTime) -> float:
    count = _ALLREDUCES_PER_LAYER * model.nlayers
    return count * allreduce_s(model.activation_nbytes(ntokens))


def _require_positive(values: Transformer | Server) -> None:
    for name, value in msgspec.structs.asdict(values).items():
        if not value > 0:
            raise InvalidArgument(f"serving: {name}={value}; allowed is above 0")


__all__ = ["Latency", "Server", "ServingPhase", "Transformer", "decode", "latency", "prefill"]
