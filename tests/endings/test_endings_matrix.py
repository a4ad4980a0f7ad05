"""Every way to end at every moment: quickly, everywhere, for the true reason, leaving nothing.

`ending_rank.py` is one rank. Rank 1 ends: by a method called in another thread or in a signal
handler, by Ctrl-C once or twice, by SIGTERM, for lack of memory, by SIGKILL.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from endings import jobs

SCRIPT = Path(__file__).with_name("ending_rank.py")
ENDS, ABSENT = 1, 2
#: From the end to the last error; while others shrink, so much more.
LIMIT_S, SHRINK_S = 1.0, 1.5

METHODS = [f"{kind}_{place}" for kind in ("abort", "revoke") for place in ("thread", "handler")]
CLOSES = ["close_thread", "close_handler"]
SIGNALS = ["interrupt", "twice", "term", "kill"]
#: `close` waits for asynchronous calls, and idle for the other ranks.
CELLS = [
    *((ending, moment) for moment in ("idle", "async") for ending in (*METHODS, *SIGNALS)),
    *((each, moment) for moment in ("call", "repair") for each in (*METHODS, *CLOSES, *SIGNALS)),
    *((ending, moment) for moment in ("init", "shrink") for ending in SIGNALS),
    *((ending, "shrink") for ending in ("abort_thread", "abort_handler", *CLOSES)),
    ("memory", "call"),
]  # fmt: skip
#: Text of the error that the others raise.
CAUSES = {
    "abort": "rank 1 gave up: abort() was called",
    "revoke": "rank 1 gave up: revoke() was called",
    "close": "rank 1 gave up: close() was called while",
    "interrupt": "KeyboardInterrupt",
    "twice": "KeyboardInterrupt",
    "term": "SystemExit",
    "memory": "MemoryError('none for partial sums')",
    "kill": "rank 1",
}
OWN = {"interrupt": "KeyboardInterrupt", "twice": "KeyboardInterrupt", "term": "SystemExit",
       "memory": "MemoryError"}  # fmt: skip


def run(ending: str, moment: str) -> tuple[dict[int, dict[str, Any]], float, list[str]]:
    """Run the job; return what each rank found, when rank 1 ended, and what each logged."""
    plan = json.dumps({"ending": ending, "moment": moment})
    outputs = jobs.run(SCRIPT, plan, nranks=3)
    found = {}
    for rank, (code, out, err) in enumerate(outputs):
        if (rank, ending) == (ENDS, "kill"):
            assert code == -signal.SIGKILL
        else:
            assert code == 0, err
            found[rank] = json.loads(out.splitlines()[-1])
    times = [jobs.ended_s(output.out) for output in outputs]
    return (
        found,
        max([*times, *(each["ended_s"] for each in found.values())]),
        [output.err for output in outputs],
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ending", "moment"), CELLS)
def test_an_end(ending: str, moment: str) -> None:
    found, ended_s, logs = run(ending, moment)
    assert ended_s, "rank 1 did not end"
    kind = ending.partition("_")[0]
    told = "\n".join(f"rank {rank}: {each}" for rank, each in found.items()) + "".join(logs)
    for rank, each in found.items():
        assert each["is_untouched"], f"memory of rank {rank} was written after its error\n{told}"
        assert not each["left"], f"rank {rank} left descriptors, threads or children\n{told}"
    own = found.pop(ENDS, None)
    if own is not None:
        assert own["raised_s"] - ended_s < (LIMIT_S if moment != "idle" else 3.0), told
        assert own.get("took_s", 0.0) < LIMIT_S, told
        if kind in OWN:
            assert own["error"] == OWN[kind], told
        else:
            assert own["error"] == "CommunicatorRevoked", told
    # A rank that comes later than the end raises when it comes.
    absent = found.pop(ABSENT)
    for each in (*found.values(), *([absent] if moment != "init" else [])):
        assert each["error"] in ("CommunicatorRevoked", "PeerLost", "NoQuorum"), told
        cause = "rank 1" if moment in ("init", "shrink") else CAUSES[kind]
        assert cause in each["text"] or (moment == "shrink" and each is absent), told
    if moment != "init":
        found[ABSENT] = absent
    # Ranks that shrink wait for the one that is absent.
    limit_s = SHRINK_S + LIMIT_S if moment == "shrink" else LIMIT_S
    for each in found.values():
        assert each["raised_s"] - ended_s < limit_s, told
