"""Serving over two nodes that lost NICs: time to the first token, and between tokens.

Nothing is calibrated. Published is a bound on the overhead alone.
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

#: Of arXiv:2407.21783, table 3.
MODELS = {
    "Llama 3.1 70B": Transformer(
        nparameters=70.6e9, nlayers=80, hidden=8192, kv_heads=8, head_size=128
    ),
    "Llama 3.1 405B": Transformer(
        nparameters=405.9e9, nlayers=126, hidden=16384, kv_heads=8, head_size=128
    ),
}

#: H100 SXM: 989 Tflop/s of bfloat16 and 3.35 TB/s, of which so much is sustained.
_FLOPS_SHARE, _MEMORY_SHARE = 0.5, 0.8
_SERVER = Server(
    nprocessors=PAIR.nranks,
    flops_per_s=_FLOPS_SHARE * 989e12,
    memory_bytes_per_s=_MEMORY_SHARE * 3.35e12,
)

_LENGTH, _SEQUENCES = 2048, 32

#: Published overhead of a lost NIC, percent.
PUBLISHED = "< 3"

_LOST: dict[str, Lost] = {"1 NIC": ((0,),), "2 NICs of a node": ((0, 4),)}
_PUBLISHED_STRATEGIES = (Strategy.HOT_REPAIR, Strategy.BALANCE, Strategy.R2CC)
_OWN = (Strategy.PACKED, Strategy.AUTO)


class _Served(NamedTuple):
    """What a strategy gives, simulated and by the closed form."""

    simulated: Latency
    model: Latency


def inference_rows(quick: bool) -> Iterator[Figure]:
    """Serve each model with and without losses."""
    for name in list(MODELS)[-1:] if quick else MODELS:
        for at, quantity in enumerate(("TTFT, ms", "TPOT, ms")):
            yield from _rows(name, at, quantity, quick)


def _rows(name: str, at: int, quantity: str, quick: bool) -> Iterator[Figure]:
    whole, ours = (_served(name, each, ()) for each in (Strategy.BALANCE, Strategy.AUTO))

    def row(case: str, strategy: str, served: _Served, before: _Served) -> Figure:
        is_published = case == "1 NIC" and strategy == Strategy.R2CC
        # The closed forms have no latency, of which a decode step's allreduces mostly consist.
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
    """Say what is assumed."""
    return [
        f"two nodes, every layer cut over all {PAIR.nranks} GPUs, two allreduces a layer, hidden "
        f"by nothing; bfloat16; one prompt of {_LENGTH} tokens (TTFT), then a token for each of "
        f"{_SEQUENCES} sequences of that length (TPOT)",
        f"H100: {_FLOPS_SHARE:g} of 989 Tflop/s in the prefill, {_MEMORY_SHARE:g} of 3.35 TB/s in "
        "a decode step; nothing is calibrated. Which models and loads were published is not known "
        "here",
        f"what was published runs, up to {TREE_NBYTES >> 10} KiB, double binary trees over nodes "
        "instead of flat rings; ours recursive doubling too",
        "R2CC-AllReduce is not below the published 3 % for the 70B model's first token, of which "
        "communication is a larger part than of the 405B model's",
        "a NIC is lost for good: the pause in which it is found out is not in these figures",
        "+%: latency over that without failures, of the flat ring and tree for what was "
        "published, of auto for ours",
        *NOTES,
    ]


__all__ = ["MODELS", "PUBLISHED", "inference_rows", "notes"]
