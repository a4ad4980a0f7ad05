"""GPU bench: checks the results and measures the speed of r2ccl on a GPU, in one command.

After the preflight (`gpu_preflight`), the bench has four parts, selected with ``--what``:
``parked`` tests which driver calls wait for a stream that waits for the host (`gpu_parked`);
``kernels`` compares the reduction kernels with a copy on the GPU, CuPy and torch (`gpu_kernels`);
``collectives`` compares allreduces of 2 and 4 ranks on one GPU, under MPS also with NCCL over
sockets (`gpu_collectives`); ``check`` runs the tests in ``tests/gpu`` and ``r2ccl doctor``. The
bench uses one GPU, the first visible one, and ends within ``--limit-s`` seconds. It lists
measurements for which time or memory did not suffice.

The last line of the output is ``ok`` or lists the failures. The exit status is 1 if an element is
wrong or a part could not run, and 69 if there is no GPU. A missed speed threshold is printed and
saved, but changes neither the last line nor the exit status.

With ``--preflight``, it only runs the preflight.
"""

from __future__ import annotations

# The preflight must run where packages that the other imports need are missing.
import sys

if __name__ == "__main__" and "--preflight" in sys.argv:
    from gpu_preflight import main as preflight

    sys.exit(preflight())

import argparse
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from common import add_json_argument, write_json
from gpu_card import open_card
from gpu_check import check
from gpu_collectives import CUT, IPC, NCCL, TCP, Collectives, cells_of, fitting
from gpu_kernels import Kernels
from gpu_outcome import Budget, Outcome
from gpu_parked import parked
from gpu_peers import find_peers
from gpu_preflight import findings, has_mps
from gpu_report import allreduce_lines, allreduce_rows, judge, kernel_lines, kernel_rows

from r2ccl.cli.perf.report import machine
from r2ccl.cli.values import format_size, parse_counts, parse_sizes
from r2ccl.errors import TransportError
from r2ccl.kernels.cuda import Launcher

_ORDINAL = 0
_KERNEL_SIZES = "1M,16M,256M,1G"
_ALLREDUCE_SIZES = "1K,16K,256K,1M,16M,64M,256M"
_ALLREDUCE_TYPES = ("float32", "bfloat16")
#: Largest amount of GPU memory that the driver and NCCL use per process.
_CONTEXT_NBYTES = 640 << 20
#: Share of the free GPU memory that the bench uses.
_MOST_OF_MEMORY = 0.9
_EXIT_UNAVAILABLE = 69


def kernels(args: argparse.Namespace, budget: Budget, outcome: Outcome) -> None:
    """Verify the kernels' results and measure their speed."""
    with open_card(_ORDINAL) as card:
        peers, lacking = find_peers(card)
        outcome.left_out += [f"comparison with {each}" for each in lacking]
        sizes = args.kernel_sizes
        measured = Kernels(
            card, Launcher(card.device), peers, sizes, seed=args.seed, loop_s=args.loop_s
        )
        begun_s = time.monotonic()
        nkernels = measured.compile()
        print(f"{nkernels} kernels loaded in {time.monotonic() - begun_s:.1f} s", flush=True)
        try:
            for at, nbytes in enumerate(measured.sizes):
                # Share the time in proportion to the sizes, because large sizes take longest.
                part = budget.part(nbytes, sum(measured.sizes[at:]))
                nrounds = measured.measure(nbytes, args.rounds, part)
                print(f"{format_size(nbytes)}: {nrounds} rounds", flush=True)
        finally:  # report what was measured before a failure
            outcome.left_out += measured.left_out
            rows = kernel_rows(measured.found)
            judge(outcome, rows)
            outcome.lines += kernel_lines(rows)
            outcome.lines.append("GB/s: 1e9 bytes read or written per second, also for the copy")


def waits(args: argparse.Namespace, budget: Budget, outcome: Outcome) -> None:
    """Test which driver calls wait for a stream that waits for the host."""
    with open_card(_ORDINAL) as card:
        parked(card.device, outcome)


def collectives(args: argparse.Namespace, budget: Budget, outcome: Outcome) -> None:
    """Verify and measure allreduces of several ranks that share the GPU."""
    ways: tuple[Any, ...] = (IPC, TCP, CUT)
    if has_mps():
        ways += (NCCL,)
    else:
        outcome.left_out.append(
            "comparison with NCCL: without MPS, ranks on one GPU take turns, which decides the "
            "result; start `nvidia-cuda-mps-control -d`"
        )
    for at, nranks in enumerate(args.nranks):
        with open_card(_ORDINAL) as card:
            free_nbytes = int(_MOST_OF_MEMORY * card.driver.free_nbytes())
        sizes = fitting(args.allreduce_sizes, nranks, len(ways), free_nbytes, _CONTEXT_NBYTES)
        outcome.left_out += [
            f"allreduces of {format_size(each)} by {nranks} ranks: they do not fit in the "
            f"{format_size(free_nbytes)} of GPU memory that the bench may use"
            for each in args.allreduce_sizes if each not in sizes
        ]  # fmt: skip
        if not sizes:
            continue
        print(f"{nranks} ranks ...", flush=True)
        measured = Collectives(
            nranks, cells_of(sizes, _ALLREDUCE_TYPES), seed=args.seed, loop_s=args.loop_s * 5,
            nrounds=args.rounds,
        )  # fmt: skip
        nrounds = measured.measure(ways, budget.part(1, len(args.nranks) - at))
        rows = allreduce_rows(nranks, measured.found)
        judge(outcome, rows)
        outcome.failures += measured.failures
        outcome.left_out += measured.left_out
        versions = ", ".join(f"{way} {version}" for way, version in measured.versions.items())
        outcome.lines += [f"{nranks} ranks, {nrounds} rounds; {versions}", *allreduce_lines(rows)]


class Part(NamedTuple):
    """A part of the bench, and its share of the time; later parts get the time it does not use."""

    run: Callable[[argparse.Namespace, Budget, Outcome], None]
    weight: float


_PARTS = {
    "parked": Part(waits, 0.5),
    "kernels": Part(kernels, 2.0),
    "collectives": Part(collectives, 3.0),
    "check": Part(lambda args, budget, outcome: check(budget, outcome), 5.0),
}


def run(part: str, args: argparse.Namespace, budget: Budget) -> Outcome:
    """Run a part; an exception, from any library, counts as a failure of that part only."""
    outcome = Outcome()
    try:
        _PARTS[part].run(args, budget, outcome)
    except Exception as exc:
        traceback.print_exc()
        outcome.failures.append(f"{part}: {type(exc).__name__}: {exc}")
    return outcome


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Verify and measure r2ccl on a GPU.")
    parser.add_argument(
        "--what", nargs="+", choices=[*_PARTS], default=[*_PARTS], help="parts; default: all"
    )
    parser.add_argument(
        "--kernel-sizes", type=parse_sizes, default=_KERNEL_SIZES, help=f"default: {_KERNEL_SIZES}"
    )
    parser.add_argument(
        "--allreduce-sizes",
        type=parse_sizes,
        default=_ALLREDUCE_SIZES,
        help=f"default: {_ALLREDUCE_SIZES}",
    )
    parser.add_argument("--nranks", type=parse_counts, default="2,4", help="default: 2,4")
    parser.add_argument("--rounds", type=int, default=9, help="largest number; default: 9")
    parser.add_argument("--seed", type=int, help="seed of the inputs; default: from the time")
    parser.add_argument("--limit-s", type=float, default=510.0, help="time limit; default: 510")
    parser.add_argument(
        "--preflight", action="store_true", help="list what the machine has and lacks, then exit"
    )
    add_json_argument(parser)
    args = parser.parse_args()
    args.loop_s = 0.02
    if args.seed is None:
        args.seed = time.time_ns() % (1 << 32)
    if args.rounds < 1 or any(each % 16 for each in (*args.kernel_sizes, *args.allreduce_sizes)):
        parser.error("--rounds must be above 0, and sizes multiples of 16 bytes")
    return args


def main() -> int:
    """Run the selected parts; print and save the results."""
    args = parse_arguments()
    budget = Budget(args.limit_s)
    try:
        with open_card(_ORDINAL) as card:
            about = card.driver.about()
    except TransportError as exc:
        is_absent = exc.status == "NO_CUDA"
        print(f"gpu: {'skipped' if is_absent else 'failed'}: {exc}", file=sys.stderr)
        return _EXIT_UNAVAILABLE if is_absent else 1
    about["seed"] = args.seed
    print(" · ".join(f"{key} {value}" for key, value in {**machine(), **about}.items()))
    found = list(findings())
    print("\npreflight", *found, sep="\n", flush=True)
    whole = Outcome(rows=[{"measure": "gpu", **about}])
    whole.rows += [{"measure": "preflight", **each._asdict()} for each in found]
    parts = [part for part in _PARTS if part in args.what]
    for at, part in enumerate(parts):
        print(f"\n{part}", flush=True)
        weight = sum(_PARTS[each].weight for each in parts[at:])
        outcome = run(part, args, budget.part(_PARTS[part].weight, weight))
        print(*outcome.lines, sep="\n", flush=True)
        for name in ("rows", "failures", "missed", "left_out"):
            getattr(whole, name).extend(getattr(outcome, name))
        if args.json:  # after each part, so that its results survive if the bench is ended early
            write_json(args.json, [*whole.rows, verdict_row(whole)])
    print("", *closing_lines(whole), sep="\n")
    return 1 if whole.failures else 0


def verdict_row(whole: Outcome) -> dict[str, Any]:
    """Return the JSON row with failures, missed thresholds and measurements left out."""
    return {
        "measure": "verdict",
        "failures": whole.failures,
        "missed": whole.missed,
        "left_out": whole.left_out,
    }


def closing_lines(whole: Outcome) -> list[str]:
    """List what was left out and missed; the last line is ``ok`` or lists the failures."""
    said = [f"left out: {each}" for each in whole.left_out]
    said += [f"threshold missed: {each}" for each in whole.missed]
    said.append("failed: " + "; ".join(whole.failures) if whole.failures else "ok")
    return [" ".join(each.split()) for each in said]  # messages of libraries may have several lines


if __name__ == "__main__":
    # Exit through the handlers that end all child processes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
