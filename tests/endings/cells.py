"""Cells of the matrix of endings: how and when rank 1 ends, and the assertions on every rank.

Each rank runs `ending_rank`. Rank 1 ends by a method called in another thread or in a signal
handler, by Ctrl-C once or twice, by SIGTERM, by lack of memory, or by SIGKILL. The last rank is
absent from the call or message that the others wait in, except in ``flow`` and ``exchange``, where
all ranks run collectives or exchange messages.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

from endings.ending_rank import ABSENT, ABSENT_S, ENDS, SHRINK_S
from support import punctual
from support.forked_ranks import Output

#: Seconds from the end of rank 1 to the last error; SHRINK_S are added while others shrink.
LIMIT_S = 1.0

METHODS = [f"{kind}_{place}" for kind in ("abort", "revoke") for place in ("thread", "handler")]
CLOSES = ["close_thread", "close_handler"]
SIGNALS = ["interrupt", "twice", "term", "kill"]
#: Expected text in the errors of the other ranks.
CAUSES = {
    "abort": "rank 1 ended the communicator: abort() was called",
    "revoke": "rank 1 ended the communicator: revoke() was called",
    "close": "rank 1 ended the communicator: close() was called while",
    "interrupt": "KeyboardInterrupt",
    "twice": "KeyboardInterrupt",
    "term": "SystemExit",
    "memory": "MemoryError('none for partial sums')",
    "kill": "rank 1",
}
OWN = {"interrupt": "KeyboardInterrupt", "twice": "KeyboardInterrupt", "term": "SystemExit",
       "memory": "MemoryError"}  # fmt: skip


class Seen(NamedTuple):
    """Findings of the surviving ranks, time at which rank 1 ended, and the log of each rank."""

    found: dict[int, dict[str, Any]]
    ended_s: float
    logs: list[str]

    def __str__(self) -> str:
        lines = [
            f"rank {rank}: {each | {'after_s': each.get('raised_s', 0.0) - self.ended_s}}"
            for rank, each in self.found.items()
        ]
        return "\n".join([*lines, *self.logs])


def plan(ending: str, moment: str, scale: float = 1.0) -> str:
    """Return the argument of `ending_rank`."""
    return json.dumps({"ending": ending, "moment": moment, "scale": scale})


def read(outputs: Sequence[Output], ending: str) -> Seen:
    """Return the findings of a job; assert that all ranks exit with 0, except one killed."""
    found = {}
    for rank, (code, out, err) in enumerate(outputs):
        if (rank, ending) == (ENDS, "kill"):
            assert code == -signal.SIGKILL
        else:
            assert code == 0, err
            found[rank] = json.loads(out.splitlines()[-1])
    times = [ended_s(output.out) for output in outputs]
    ended = max([*times, *(each["ended_s"] for each in found.values())])
    return Seen(found, ended, [output.err for output in outputs])


def ended_s(out: str) -> float:
    """Return the time at which a rank printed that it ends; 0 if it did not."""
    said = [float(line[5:]) for line in out.splitlines() if line.startswith("ends ")]
    return max(said, default=0.0)


def judge(seen: Seen, ending: str, moment: str, scale: float = 1.0) -> None:
    """Assert that every rank ended for the right reason and left nothing behind, and in time.

    Raises `punctual.Late` if a rank was late.
    """
    assert seen.ended_s, "rank 1 did not end"
    kind = ending.partition("_")[0]
    told, found = str(seen), dict(seen.found)
    for rank, each in found.items():
        assert each["is_untouched"], f"memory of rank {rank} was written after its error\n{told}"
        assert not each["left"], f"rank {rank} left descriptors, threads or children\n{told}"
    own = found.pop(ENDS, None)
    if own is not None:
        limit_s = LIMIT_S if moment != "idle" else 2.2
        assert own["error"] == OWN.get(kind, "CommunicatorRevoked"), told
        punctual.check(own["raised_s"] - seen.ended_s, limit_s * scale, told)
        punctual.check(own.get("took_s", 0.0), LIMIT_S * scale, told)
    # A rank that calls after the end raises when it calls.
    absent = found.pop(ABSENT)
    for each in (*found.values(), *([absent] if moment != "init" else [])):
        assert each["error"] in ("CommunicatorRevoked", "PeerLost", "NoQuorum"), told
        cause = "rank 1" if moment in ("init", "shrink") else CAUSES[kind]
        assert cause in each["text"] or (moment == "shrink" and each is absent), told
    if moment != "init":
        found[ABSENT] = absent
    # Ranks that shrink wait for the absent rank, which calls late where its sleep took longer.
    until_call_s, is_shrink = (SHRINK_S, True) if moment == "shrink" else (ABSENT_S, False)
    limit_s = (SHRINK_S + LIMIT_S if is_shrink else LIMIT_S) * scale
    late_s = max(0.0, absent.get("calls_s", 0.0) - seen.ended_s - until_call_s * scale)
    for each in found.values():
        may_be_late = is_shrink or each is absent
        punctual.check(each["raised_s"] - seen.ended_s, limit_s + late_s * may_be_late, told)
