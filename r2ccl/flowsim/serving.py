"""Serving a transformer whose layers are cut over the processors of several nodes.

Every layer ends twice, after its attention and after its feed-forward part, with an allreduce of
the activations of all tokens that are being worked on (tensor parallelism); nothing hides it. In
the *prefill* these are the tokens of the prompt, and operations decide how long it takes. In a
*decode* step it is one token of each sequence, and what decides is memory: all weights are read
once, and the keys and values of all tokens before.

How long an allreduce takes is asked of a function, so that this file knows nothing of networks.
Queues, batching over time and pipelines are not modelled.

Imports `errors` and `training`. Invariant: times do not fall when an allreduce takes longer.

References
----------
Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model
parallelism", arXiv:1909.08053, 2019: two allreduces a layer in the forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.training import AllreduceTime

_ALLREDUCES_PER_LAYER = 2


class Transformer(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served.

    Parameters
    ----------
    nparameters : float
    nlayers : int
    hidden : int
        Elements of a token's activations.
    kv_heads, head_size : int
        Heads whose keys and values are kept, and elements of each of the two.
    itemsize : int
        Bytes of a weight, an activation, a key or a value.

    Raises
    ------
    InvalidArgument
        A value that is not above 0.
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
        """Return the bytes of one allreduce."""
        return ntokens * self.hidden * self.itemsize


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """The processors over which every layer is cut.

    Parameters
    ----------
    nprocessors : int
    flops_per_s : float
        Operations per second of one, as sustained in a prefill.
    memory_bytes_per_s : float
        Bytes per second that one reads, as sustained in a decode step.

    Raises
    ------
    InvalidArgument
        A value that is not above 0.
    """

    nprocessors: int
    flops_per_s: float
    memory_bytes_per_s: float

    def __post_init__(self) -> None:
        _require_positive(self)


class ServingPhase(NamedTuple):
    """Seconds of a prefill or of one decode step."""

    compute_s: float
    communication_s: float

    @property
    def time_s(self) -> float:
        """Both, one after the other."""
        return self.compute_s + self.communication_s


class Latency(NamedTuple):
    """What a user waits for.

    Attributes
    ----------
    ttft_s : float
        Until the first token.
    tpot_s : float
        Between one token and the next.
    """

    ttft_s: float
    tpot_s: float

    def request_s(self, noutput: int) -> float:
        """Return the seconds until the last of `noutput` tokens."""
        return self.ttft_s + max(0, noutput - 1) * self.tpot_s


def prefill(
    model: Transformer, server: Server, nprompts: int, length: int, allreduce_s: AllreduceTime
) -> ServingPhase:
    """Work through prompts of `length` tokens each, together.

    Two operations a parameter and token; and in every layer, for each pair of a token and one
    before it and each element of an activation, two for the score and two for the sum.
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
    """Make one token of each of `nsequences`, which have `context` tokens before it."""
    weights = model.nparameters * model.itemsize / server.nprocessors
    # A head is not cut: more processors than heads hold copies.
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
    """Serve one prompt of `length` tokens, then decode it among `nsequences` of that length."""
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
