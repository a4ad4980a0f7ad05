"""`Run`: record of one training run of a demo, built from the output of its ranks.

A rank prints lines of JSON. Rank 0 prints a `Step` for each step. At its end, every rank prints an
object with its ``rank`` and its ``repairs``, and saves its final weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from demos import cluster
from demos.narration import Narration

from r2ccl.testing import Fault, FaultPlan


class Step(NamedTuple):
    """Report of rank 0 about one training step; times are CLOCK_MONOTONIC seconds.

    `begun_s` and `took_s` are those of the part of the step that contains its allreduces. `part` is
    the part of the training, such as an epoch, from 0.
    """

    part: int
    loss: float
    begun_s: float
    took_s: float


class Run:
    """Record of one training run.

    Parameters
    ----------
    folder : Path
        Where the ranks save their final weights, as ``weights-RANK.npy``.
    narration : Narration
        Displays the progress.

    Attributes
    ----------
    steps : list of Step
    ends : dict
        Maps each rank to the object that it printed at its end.
    """

    def __init__(self, folder: Path, narration: Narration) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self.ends: dict[int, dict[str, Any]] = {}
        self._narration = narration

    def take(self, line: str) -> None:
        """Handle a line of output, ``[rank] text``: record JSON, display any other text."""
        text = line.partition("] ")[2]
        if not text.startswith("{"):
            self._narration.line(line)
            return
        said = json.loads(text)
        if "repairs" in said:
            self.ends[said["rank"]] = said
        else:
            self.steps.append(Step(**said))
            self._narration.step(said["part"], said["loss"])

    def losses(self) -> list[float]:
        """Return the mean loss of each part."""
        parts = range(self.steps[-1].part + 1)
        return [float(np.mean([s.loss for s in self.steps if s.part == at])) for at in parts]

    def weights(self) -> set[bytes]:
        """Return the final weights of all ranks; one element if all are bit-for-bit equal."""
        files = (self.folder / f"weights-{rank}.npy" for rank in range(cluster.NODES))
        return {np.load(file).tobytes() for file in files}

    def repairs(self, rail: int) -> dict[int, list[dict[str, Any]]]:
        """Return the repairs of each rank after the loss of a NIC of `rail`."""
        return {
            rank: [each for each in end["repairs"] if each["rail"] == rail]
            for rank, end in self.ends.items()
        }

    def step_at(self, time_s: float) -> Step | None:
        """Return the first step whose allreduces ended after `time_s`; None if there is none.

        If a fault occurs just before a rank sends a slice, this is the step of that slice: a rank
        may send it before rank 0, whose times the steps have, begins the step.
        """
        return next((step for step in self.steps if time_s <= step.begun_s + step.took_s), None)

    def cut_time(self, plan: FaultPlan, fault: Fault) -> float | None:
        """Return the time of a NIC failure (CLOCK_MONOTONIC seconds); None if there was none."""
        for firing in plan.fired:
            if firing.fault == fault:
                return firing.time_s
        # Without a netlab, the rank cuts its own connections, and no time is recorded in `plan`.
        # Use the time at which the rank first learned, from a socket or a peer, that a connection
        # was lost.
        assert fault.node is not None
        assert fault.rail is not None
        lost = self.repairs(fault.rail)[fault.node]
        return min((each["failed_s"] for each in lost), default=None)
