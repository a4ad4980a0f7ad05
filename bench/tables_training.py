"""Rows of the table "r2ccl-training": the published testbed, larger clusters, 1 to 10 lost NICs.

One published figure sets the speed of a GPU: tokens per second without failures. All others are
predicted. Losses are drawn at random and are the same for every strategy. A draw depends only on
the seed and its number, not on how the simulations are spread over processes.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from tables_failures import executor
from tables_models import Figure, percent
from tables_strategies import (
    NICS,
    NOTES,
    OURS,
    PAIR,
    Cluster,
    Lost,
    Strategy,
    allreduce_s,
    canonical,
    model_s,
    smaller_model_s,
    smaller_s,
)

from r2ccl.flowsim.training import TrainingJob, compute_s, step

#: Published tokens/s of 2.7 billion parameters on 16 GPUs; one NIC is lost except for "none".
PUBLISHED = {
    "none": 314618,
    "AdapCC": 289565,
    Strategy.HOT_REPAIR: 300151,
    Strategy.BALANCE: 310516,
    Strategy.R2CC: 312394,
}
_PUBLISHED_TWO = 310756

#: Published overhead of R2CC-AllReduce at 512 GPUs, in percent.
PUBLISHED_FAILURES = {"1 NIC": "1.5", "10 NICs": "4.3"}

_LENGTH = 2048
_SMALL, _LARGE = 2.7e9, 6.7e9
_LARGE_TOKENS, _LARGE_GPUS = 1 << 21, 512
_ITEMSIZE = 4
_BUCKET_NBYTES = 40_000_000 * _ITEMSIZE

#: Sequences per batch on the published testbed. `--quick` shows only `BATCH`, which also sets the
#: speed of a GPU for the larger clusters.
_BATCHES = (64, 128, 256, 512)
BATCH = 128

_PUBLISHED_STRATEGIES = (Strategy.HOT_REPAIR, Strategy.BALANCE, Strategy.R2CC)
_COMPARED = (*_PUBLISHED_STRATEGIES, Strategy.PACKED, Strategy.LEAF, Strategy.AUTO)
_AVERAGED = (*_PUBLISHED_STRATEGIES, Strategy.PACKED, Strategy.AUTO)

#: Mean lifetime of a NIC (exponential), and time until it is replaced, in hours.
_LIFE_H, _AWAY_H = 20_000.0, 48.0

_MOST_LOST = 10


class _Setting(NamedTuple):
    """Job on a cluster, calibrated once for the simulation and once for the closed forms."""

    name: str
    cluster: Cluster
    ngpus: int
    ntokens: int
    simulated: TrainingJob
    model: TrainingJob


class _Times(NamedTuple):
    """Step times in seconds, simulated and by the closed form."""

    simulated: float
    model: float


def training_rows(args: argparse.Namespace) -> Iterator[Figure]:
    """Simulate the testbed, then larger clusters."""
    for batch in (BATCH,) if args.quick else _BATCHES:
        yield from _testbed_rows(_testbed(batch, 0), is_published=True, has_two=not args.quick)
    yield from _testbed_rows(_testbed(BATCH, _BUCKET_NBYTES), is_published=False, has_two=False)
    for ngpus in (64,) if args.quick else (64, 128, 256, 512, 1024):
        yield from _one_lost_rows(_large(ngpus))
    yield from _failure_rows(_large(128 if args.quick else _LARGE_GPUS), args)


def _testbed(batch: int, bucket_nbytes: int) -> _Setting:
    """Return the testbed: 2.7 billion parameters on two nodes, with calibrated compute time."""
    ntokens, nbytes = batch * _LENGTH, int(_SMALL * _ITEMSIZE)
    step_s = ntokens / PUBLISHED["none"]

    def job(allreduce: float) -> TrainingJob:
        return TrainingJob(
            compute_s=step_s - allreduce,
            gradient_nbytes=nbytes,
            bucket_nbytes=bucket_nbytes,
            nmicrobatches=max(1, batch // 64),
        )

    simulated = job(allreduce_s(PAIR, Strategy.BALANCE, (), nbytes))
    model = job(model_s(PAIR, Strategy.BALANCE, (), nbytes))
    overlap = ", overlapped" if bucket_nbytes else ""
    name = f"2.7B, {batch} sequences{overlap}"
    return _Setting(name, PAIR, PAIR.nranks, ntokens, simulated, model)


def _large(ngpus: int) -> _Setting:
    """Return 6.7 billion parameters on the same GPUs; tokens grow with the number of GPUs."""
    ntokens = _LARGE_TOKENS * ngpus // _LARGE_GPUS
    testbed = _testbed(BATCH, 0)

    def job(calibrated: TrainingJob) -> TrainingJob:
        operations = compute_s(_SMALL, testbed.ntokens, 1.0)
        rate = operations / calibrated.compute_s / testbed.ngpus
        seconds = compute_s(_LARGE, ntokens, rate * ngpus)
        return TrainingJob(compute_s=seconds, gradient_nbytes=int(_LARGE * _ITEMSIZE))

    jobs = (job(testbed.simulated), job(testbed.model))
    return _Setting("6.7B", Cluster(ngpus // NICS), ngpus, ntokens, *jobs)


def _times(setting: _Setting, strategy: Strategy, lost: Lost) -> _Times:
    pattern = canonical(strategy, lost)

    def time_s(
        job: TrainingJob, allreduce: Callable[[Cluster, Strategy, Lost, int], float]
    ) -> float:
        return step(job, partial(allreduce, setting.cluster, strategy, pattern)).time_s

    return _Times(time_s(setting.simulated, allreduce_s), time_s(setting.model, model_s))


def _testbed_rows(setting: _Setting, *, is_published: bool, has_two: bool) -> Iterator[Figure]:
    """Simulate the loss of one NIC and, with `has_two`, of two."""
    whole = _times(setting, Strategy.BALANCE, ())
    ours = _times(setting, Strategy.AUTO, ())
    published: dict[str, int] = dict(PUBLISHED) if is_published else {}

    def row(
        case: str, strategy: str, times: _Times, before: _Times, paper: int | None = None
    ) -> Figure:
        return _figure(setting, case, strategy, times, before, paper)

    yield row("none", "flat ring", whole, whole, published.get("none"))
    yield row("none", "auto", ours, ours)
    one: Lost = ((0,),)
    for strategy in _COMPARED:
        before = whole if strategy in _PUBLISHED_STRATEGIES else ours
        paper = published.get(strategy)
        yield row("1 NIC", strategy, _times(setting, strategy, one), before, paper)
    yield row("1 NIC", "AdapCC", _smaller(setting), whole, published.get("AdapCC"))
    if not has_two:
        return
    two = {"2 NICs of a node": ((0, 4),), "1 NIC of each node": ((0,), (0,))}
    for case, lost in two.items():
        for strategy in (Strategy.BALANCE, Strategy.R2CC, Strategy.AUTO):
            before = ours if strategy == Strategy.AUTO else whole
            paper = _PUBLISHED_TWO if strategy == Strategy.R2CC else None
            yield row(case, strategy, _times(setting, strategy, lost), before, paper)


def _smaller(setting: _Setting) -> _Times:
    """Return the step times when all GPUs but one process the same batch."""
    more = setting.ngpus / (setting.ngpus - 1)

    def time_s(job: TrainingJob, allreduce: Callable[[Cluster, int], float]) -> float:
        slower = msgspec.structs.replace(job, compute_s=more * job.compute_s)
        return step(slower, partial(allreduce, setting.cluster)).time_s

    return _Times(time_s(setting.simulated, smaller_s), time_s(setting.model, smaller_model_s))


def _figure(
    setting: _Setting,
    case: str,
    strategy: str,
    times: _Times,
    before: _Times,
    paper: int | None = None,
    paper_overhead: str = "",
    source: str = "R2CCL",
) -> Figure:
    if paper:
        paper_overhead = f"{percent(PUBLISHED['none'], paper):.2f}"
    return Figure(
        table="r2ccl-training",
        setting=setting.name,
        case=case,
        strategy=strategy,
        ngpus=setting.ngpus,
        quantity="tokens/s",
        simulated=setting.ntokens / times.simulated,
        overhead=percent(times.simulated, before.simulated),
        paper=str(paper) if paper else "",
        paper_overhead=paper_overhead,
        model=setting.ntokens / times.model,
        model_overhead=percent(times.model, before.model),
        source=source if paper_overhead else "",
    )


def _one_lost_rows(setting: _Setting) -> Iterator[Figure]:
    whole = _times(setting, Strategy.BALANCE, ())
    for strategy in (Strategy.BALANCE, Strategy.R2CC, Strategy.AUTO):
        paper = "< 1.1" if strategy == Strategy.R2CC else ""
        times = _times(setting, strategy, ((0,),))
        yield _figure(
            setting,
            "1 NIC",
            strategy,
            times,
            whole,
            paper_overhead=paper,
            source="R2CCL, NSDI",
        )


def draw(seed: int, number: int, nnodes: int) -> tuple[int, ...]:
    """Draw `_MOST_LOST` different NICs with equal probability; NIC i is on node i // NICS."""
    chance = random.Random(f"{seed}/{number}/lost")
    return tuple(chance.sample(range(nnodes * NICS), _MOST_LOST))


def draw_any_time(seed: int, number: int, nnodes: int) -> tuple[int, ...]:
    """Draw the NICs that are down at a random time, given `_LIFE_H` and `_AWAY_H`."""
    chance = random.Random(f"{seed}/{number}/any time")
    share = _AWAY_H / (_LIFE_H + _AWAY_H)
    return tuple(nic for nic in range(nnodes * NICS) if chance.random() < share)


def by_node(nics: Sequence[int], nnodes: int) -> Lost:
    """Group NICs by node."""
    return tuple(
        tuple(sorted(nic % NICS for nic in nics if nic // NICS == node)) for node in range(nnodes)
    )


def _failure_rows(setting: _Setting, args: argparse.Namespace) -> Iterator[Figure]:
    numbers = range(args.first, args.first + args.patterns)
    nnodes = setting.cluster.nnodes
    drawn = [draw(args.seed, number, nnodes) for number in numbers]
    counts = (1, _MOST_LOST) if args.quick else (1, 2, 4, 6, 8, _MOST_LOST)
    cases = {
        f"{count} NICs" if count > 1 else "1 NIC": [by_node(nics[:count], nnodes) for nics in drawn]
        for count in counts
    }
    cases["at any time"] = [
        by_node(draw_any_time(args.seed, number, nnodes), nnodes) for number in numbers
    ]
    found = _all_times(setting, [lost for draws in cases.values() for lost in draws], args)
    whole = _times(setting, Strategy.BALANCE, ())
    published = PUBLISHED_FAILURES if setting.ngpus == _LARGE_GPUS else {}
    for case, draws in cases.items():
        for strategy in _AVERAGED:
            times = [found[strategy, canonical(strategy, lost)] for lost in draws]
            paper = published.get(case, "") if strategy == Strategy.R2CC else ""
            yield _figure(
                setting, f"{case}, mean", strategy, _mean(times), whole, paper_overhead=paper
            )
            if case == "10 NICs":
                yield _figure(setting, f"{case}, worst", strategy, max(times), whole)


def _mean(times: Sequence[_Times]) -> _Times:
    return _Times(*(statistics.fmean(column) for column in zip(*times, strict=True)))


def _all_times(
    setting: _Setting, draws: Sequence[Lost], args: argparse.Namespace
) -> dict[tuple[Strategy, Lost], _Times]:
    """Simulate every distinct pattern once per strategy, in parallel if `args` asks for it."""
    parts = dict.fromkeys((*_PUBLISHED_STRATEGIES, *OURS))
    tasks = list(dict.fromkeys((each, canonical(each, lost)) for each in parts for lost in draws))
    found = dict(zip(tasks, _map(setting, tasks, args), strict=True))
    for lost in draws:
        pattern = canonical(Strategy.AUTO, lost)
        found[Strategy.AUTO, pattern] = min(found[each, pattern] for each in OURS)
    return found


def _map(
    setting: _Setting, tasks: Sequence[tuple[Strategy, Lost]], args: argparse.Namespace
) -> list[_Times]:
    full = [(setting, *task) for task in tasks]
    if args.jobs == 1 and not args.mpi:
        return list(map(_task_times, full))
    with executor(args.jobs, mpi=args.mpi) as pool:
        return list(pool.map(_task_times, full))


def _task_times(task: tuple[_Setting, Strategy, Lost]) -> _Times:
    return _times(*task)


def notes(args: argparse.Namespace) -> list[str]:
    """Return assumptions, calibration, and how losses were drawn."""
    shares = []
    for batch in _BATCHES:
        job = _testbed(batch, 0)
        communication = 1 - job.simulated.compute_s * PUBLISHED["none"] / job.ntokens
        rate = compute_s(_SMALL, job.ntokens, 1.0) / job.simulated.compute_s / job.ngpus
        shares.append(f"{batch}: {100 * communication:.1f} %, {rate / 1e12:.0f} Tflop/s per GPU")
    return [
        f"2.7B: two nodes of {NICS} GPUs, data parallel over all 16; gradients of {_ITEMSIZE} "
        "bytes, reduced after the backward unless 'overlapped', then in buckets of "
        f"{_BUCKET_NBYTES / 1e6:g} MB as they become final",
        f"the batch of the published run is not known: several are shown, of {_LENGTH} tokens "
        "per sequence. Only the compute time is calibrated, so that tokens/s without failures are "
        "as published. Sequences: share of communication:  " + "; ".join(shares),
        "published overheads of Balance and R2CC-AllReduce both follow from a share of about 9 %, "
        "that of HotRepair from 5 %, so that no batch gives all three; with 64 sequences HotRepair "
        "falls behind AdapCC, which is not as published",
        "6.7B: tensors parallel inside nodes, data parallel over nodes, which are the ranks; "
        f"{_LARGE_TOKENS // _LARGE_GPUS} tokens per GPU (2^21 on 512: GPT-3's batch for this size, "
        f"arXiv:2005.14165), GPUs as fast as with {BATCH} sequences above; nothing overlapped. "
        "Published figures at 512 GPUs and more may be of other models and batches: "
        "R2CC-AllReduce with one NIC lost is above the published 1.1 % here",
        "+%: step time over that without failures: of the flat ring for published strategies, of "
        "auto for ours; of the ring over nodes for 6.7B",
        "AdapCC: the GPU beside the lost NIC drops out, and the other 15 process the same batch",
        f"mean, worst: of {args.patterns} draws from number {args.first}, seed {args.seed}, every "
        f"NIC equally likely, the same draws for all strategies; at any time: NICs live for "
        f"{_LIFE_H:g} h on average (exponential) and are down for {_AWAY_H:g} h",
        *NOTES,
    ]


__all__ = [
    "BATCH",
    "PUBLISHED",
    "PUBLISHED_FAILURES",
    "by_node",
    "draw",
    "draw_any_time",
    "notes",
    "training_rows",
]
