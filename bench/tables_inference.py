"""Rows of the table "r2ccl-inference": serving over two nodes that lost NICs.

The quantities are the time to the first token and the time between tokens. Nothing is calibrated.
The paper publishes only an upper bound of the overhead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from tables_models import Figure, percent
from tables_strategies import (
    NOTES,
    PAIR,
    TREE_NBYTES,
    Lost,
    Strategy,
    allreduce_s,
    canonical,
    model_s,
)

from r2ccl.flowsim.serving import Latency, Server, Transformer, latency

#: Models of arXiv:2407.21783, table 3.
MODELS = {
    "Llama 3.1 70B": Transformer(
        nparameters=70.6e9, nlayers=80, hidden=8192, kv_heads=8, head_size=128
    ),
    "Llama 3.1 405B": Transformer(
        nparameters=405.9e9, nlayers=126, hidden=16384, kv_heads=8, head_size=128
    ),
}

#: H100 SXM: sustained shares of its 989 Tflop/s of bfloat16 and of its 3.35 TB/s.
_FLOPS_SHARE, _MEMORY_SHARE = 0.5, 0.8
_SERVER = Server(
    nprocessors=PAIR.nranks,
    flops_per_s=_FLOPS_SHARE * 989e12,
    memory_bytes_per_s=_MEMORY_SHARE * 3.35e12,
)

_LENGTH, _SEQUENCES = 2048, 32

#: Published overhead with one NIC lost, in percent.
PUBLISHED = "< 3"

_LOST: dict[str, Lost] = {"1 NIC": ((0,),), "2 NICs of a node": ((0, 4),)}
_PUBLISHED_STRATEGIES = (Strategy.HOT_REPAIR, Strategy.BALANCE, Strategy.R2CC)
_OWN = (Strategy.PACKED, Strategy.AUTO)


class _Served(NamedTuple):
    """Latencies of a strategy, simulated and by the closed form."""

    simulated: Latency
    model: Latency


def inference_rows(quick: bool) -> Iterator[Figure]:
    """Simulate serving each model with and without losses."""
    for name in list(MODELS)[-1:] if quick else MODELS:
        for at, quantity in enumerate(("TTFT, ms", "TPOT, ms")):
            yield from _rows(name, at, quantity, quick)


def _rows(name: str, at: int, quantity: str, quick: bool) -> Iterator[Figure]:
    whole, ours = (_served(name, each, ()) for each in (Strategy.BALANCE, Strategy.AUTO))

    def row(case: str, strategy: str, served: _Served, before: _Served) -> Figure:
        is_published = case == "1 NIC" and strategy == Strategy.R2CC
        # The closed forms have no latency, which dominates the allreduces of a decode step.
        has_model = quantity.startswith("TTFT")
        return Figure(
            table="r2ccl-inference",
            setting=name,
            case=case,
            strategy=strategy,
            ngpus=PAIR.nranks,
            quantity=quantity,
            simulated=1e3 * served.simulated[at],
            overhead=percent(served.simulated[at], before.simulated[at]),
            paper_overhead=PUBLISHED if is_published else "",
            model=1e3 * served.model[at] if has_model else None,
            model_overhead=percent(served.model[at], before.model[at]) if has_model else None,
            source="R2CCL" if is_published else "",
        )

    yield row("none", "flat ring, tree", whole, whole)
    yield row("none", "auto", ours, ours)
    for case, lost in list(_LOST.items())[: 1 if quick else None]:
        for strategy in (*_PUBLISHED_STRATEGIES, *_OWN):
            before = ours if strategy in _OWN else whole
            yield row(case, strategy, _served(name, strategy, lost), before)


def _served(name: str, strategy: Strategy, lost: Lost) -> _Served:
    pattern = canonical(strategy, lost)
    simulated, model = (
        latency(
            MODELS[name],
            _SERVER,
            length=_LENGTH,
            nsequences=_SEQUENCES,
            allreduce_s=partial(allreduce, PAIR, strategy, pattern),
        )
        for allreduce in (allreduce_s, model_s)
    )
    return _Served(simulated, model)


def notes() -> list[str]:
    """Return the assumptions behind the table."""
    return [
        f"two nodes, every layer sharded over all {PAIR.nranks} GPUs, two allreduces per layer, "
        f"not overlapped; bfloat16; one prompt of {_LENGTH} tokens (TTFT), then a token for each "
        f"of {_SEQUENCES} sequences of that length (TPOT)",
        f"H100: {_FLOPS_SHARE:g} of 989 Tflop/s in the prefill, {_MEMORY_SHARE:g} of 3.35 TB/s in "
        "a decode step; nothing is calibrated. The models and loads of the publication are not "
        "known",
        f"published strategies run, up to {TREE_NBYTES >> 10} KiB, double binary trees over nodes "
        "instead of flat rings; ours recursive doubling too",
        "R2CC-AllReduce is not below the published 3 % for the 70B model's first token, of which "
        "communication is a larger part than of the 405B model's",
        "a NIC is lost for good: the time to detect the loss is not in these figures",
        "+%: latency over that without failures, of the flat ring and tree for published "
        "strategies, of auto for ours",
        *NOTES,
    ]


__all__ = ["MODELS", "PUBLISHED", "inference_rows", "notes"]
