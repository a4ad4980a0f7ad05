"""One rank of the tests of verdicts: three nodes, one rank each, and a fault in every round.

Started by ``r2ccl launch`` inside a lab of three nodes. Rank 0 works the faults; every rank writes
what it found in each round, as JSON, into the folder it is given. The round of a killed process is
the job's last, and only its survivors write.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import r2ccl
from r2ccl.failover.diagnosis.verdict import Verdict, VerdictKind

NRANKS = 3
NICS = int(os.environ["R2CC_RDMALAB_NICS"])
COUNT = 200_000
#: The machine is emulated: a rank may be away for a second.
SUSPICION_S = 3.0
SETTINGS = {
    "init_timeout_s": 120.0,
    "timeout_s": 90.0,
    "peer_timeout_s": 60.0,
    "no_rail_timeout_s": 60.0,
    "suspicion_timeout_s": SUSPICION_S,
    "probe_timeout_s": 1.0,
    "quarantine_cap_s": 0.0,
}
PATIENCE_S = 40.0
#: Two rounds of a diagnosis, at one end and then at the other.
REVISION_S = 10.0

Undo = Callable[[], object]


def call(*words: str) -> None:
    subprocess.run(words, check=True, timeout=PATIENCE_S)


def nic_down(nic: str) -> Undo:
    """The port goes down; its owner is told."""
    call("ip", "link", "set", nic, "down")
    return lambda: call("ip", "link", "set", nic, "up")


def hole(node: int, nic: int) -> Undo:
    """Nothing leaves the NIC or comes to it, and every carrier is up."""
    ends = f"n{node}r{nic}", f"s{node}r{nic}"
    for end in ends:
        call("tc", "qdisc", "add", "dev", end, "root", "netem", "loss", "100%")

    def undo() -> None:
        for end in ends:
            call("tc", "qdisc", "del", "dev", end, "root")

    return undo


def isolate(nic: int) -> Undo:
    """Nodes 1 and 2 do not reach each other on this rail; node 0 reaches both."""
    ports = [f"s{node}r{nic}" for node in (1, 2)]

    def put(flag: str) -> None:
        for port in ports:
            call("ip", "link", "set", port, "type", "bridge_slave", "isolated", flag)

    put("on")
    return lambda: put("off")


def stop(pid: int) -> Undo:
    """The process stands still for longer than is needed to suspect it."""
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(2.5 * SUSPICION_S, os.kill, (pid, signal.SIGCONT)).start()
    return lambda: None


class Run:
    """One rank's communicator and what it has found with it."""

    def __init__(self, comm: r2ccl.Communicator) -> None:
        self.comm = comm
        self.rounds: list[dict[str, Any]] = []
        self.first = len(comm.health().rails) - NICS  # rails of RDMA come after those of TCP
        pids = np.zeros(comm.nranks, np.int64)
        pids[comm.rank] = os.getpid()
        self.pids = comm.allreduce(pids)

    def round(self, kind: str, seed: int) -> None:
        """Let a fault strike in the midst of sums, and write down what is found."""
        chance = random.Random(f"{kind} {seed}")
        nic, node = chance.randrange(NICS), chance.randrange(1, 3)
        made: list[Undo] = []

        def strike() -> None:
            match kind:
                case "nic_down":
                    made.append(nic_down(f"n{node}r{nic}"))
                case "hole":
                    made.append(hole(node, nic))
                case "isolate":
                    made.append(isolate(nic))
                case "stop":
                    made.append(stop(int(self.pids[node])))
                case "kill":
                    os.kill(int(self.pids[node]), signal.SIGKILL)

        since_s, before = time.monotonic(), len(self.comm.repairs())
        self.comm.barrier()  # no rank begins the round after the fault
        timer = threading.Timer(chance.uniform(0.02, 0.3), strike)
        if self.comm.rank == 0:
            timer.start()
        self.allreduce(4)
        if self.comm.rank == 0:
            timer.join()
        # What the fault did may show only in what is sent after it.
        give_up = time.monotonic() + PATIENCE_S
        while not self.is_noticed(kind, before):
            assert time.monotonic() < give_up, "nothing came of the fault"
            self.allreduce(1)
        self.await_verdicts(kind, since_s)
        if kind != "stop":
            self.await_other_ends(kind, since_s)
        found = {
            f"{each.path.peer} {each.path.rail - self.first}": each.kind.value
            for each in self.verdicts(kind, since_s)
        }
        self.rounds.append(
            {"nic": nic, "node": node, "found": found,
             "nrepairs": len(self.comm.repairs()) - before}
        )  # fmt: skip
        self.comm.barrier()
        for undo in made:
            undo()
        self.until(lambda: all(rail.state == "up" for rail in self.comm.health().rails))
        self.comm.barrier()

    def is_noticed(self, kind: str, before: int) -> bool:
        """Whether any rank moved work, as all of them see it; of a stopped process none may."""
        nmoved = np.array([len(self.comm.repairs()) - before])
        self.comm.allreduce(nmoved)
        return kind == "stop" or bool(nmoved[0])

    def allreduce(self, times: int) -> None:
        """Sum, and check every element."""
        for turn in range(times):
            x = np.full(COUNT, self.comm.rank + turn, np.float32)
            self.comm.allreduce(x)
            assert (x == 3 + 3 * turn).all()

    def verdicts(self, kind: str, since_s: float) -> list[Verdict]:
        """Return those of the round.

        A rank that waits long for a NIC to fail is slow to others, on every path: that counts only
        if a process was stopped.
        """
        new = [each for each in self.comm.verdicts() if each.when_s > since_s]
        return [each for each in new if each.is_down or kind == "stop"]

    def await_verdicts(self, kind: str, since_s: float) -> None:
        """Wait until there is one on each path that was given up."""

        def lost() -> set[tuple[int, int]]:
            return {(r.peer, r.rail) for r in self.comm.repairs() if r.failed_s > since_s}

        def judged() -> set[tuple[int, int]]:
            return {tuple(each.path) for each in self.verdicts(kind, since_s)}

        self.until(lambda: lost() <= judged())
        # An end that could not tell may hear better from the other.
        give_up = time.monotonic() + REVISION_S
        while any(each.kind is VerdictKind.PATH for each in self.verdicts(kind, since_s)):
            if time.monotonic() > give_up:
                return
            time.sleep(0.02)

    def await_other_ends(self, kind: str, since_s: float) -> None:
        """Wait until both ends of each path have a verdict on it.

        An end that lost nothing on the path hears from the other, which may be later.
        """
        give_up = time.monotonic() + PATIENCE_S
        while True:
            judged = np.zeros((NRANKS, NRANKS, NICS), np.int64)
            for each in self.verdicts(kind, since_s):
                if each.path.rail >= self.first:
                    judged[self.comm.rank, each.path.peer, each.path.rail - self.first] = 1
            self.comm.allreduce(judged)
            if (judged == judged.transpose(1, 0, 2)).all():
                return
            late = time.monotonic() > give_up
            assert not late, f"only one end has a verdict: {np.argwhere(judged).tolist()}"
            time.sleep(0.02)

    def until(self, is_so: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < give_up, str(self.comm.health())
            time.sleep(0.02)


def main() -> None:
    """Run rounds of the kind that is named."""
    kind, first, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder = Path(sys.argv[4])
    node = int(os.environ["RANK"])
    os.environ["R2CC_HCA"] = "=" + ",".join(f"rxe_n{node}r{nic}" for nic in range(NICS))
    with r2ccl.init(**SETTINGS) as comm:
        run = Run(comm)
        run.allreduce(1)
        try:
            for seed in range(first, first + rounds):
                run.round(kind, seed)
        except r2ccl.PeerLost as exc:
            run.rounds.append({"lost": exc.peer, "text": str(exc)})
            comm.abort()
        (folder / f"{comm.rank}.json").write_text(json.dumps(run.rounds))


if __name__ == "__main__":
    main()
