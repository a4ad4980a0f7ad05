"""One rank of the repair tests: allreduces while NICs go down, or swallow packets, and come back.

Started by ``r2ccl launch`` inside the lab, two ranks a node. Rank 0 works the NICs; every rank
checks every sum and writes what it saw, as JSON, into the folder it is given.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import r2ccl

NODES, NICS = (int(os.environ[f"R2CC_RDMALAB_{what}"]) for what in ("NODES", "NICS"))
COUNT = 200_000
#: The machine is emulated: a rank may be away for seconds.
PATIENCE = {
    "init_timeout_s": 120.0,
    "timeout_s": 90.0,
    "peer_timeout_s": 60.0,
    "no_rail_timeout_s": 60.0,
    "suspicion_timeout_s": 5.0,
    # The same NICs go down again and again: what is tested is the repair.
    "quarantine_cap_s": 0.0,
}


def set_link(node: int, nic: int, is_up: bool) -> None:
    """Take a NIC down, or up again."""
    device = f"n{node}r{nic}"
    subprocess.run(["ip", "link", "set", device, "up" if is_up else "down"], check=True)


class Hole:
    """Has both ends of a wire drop all they send, with their carrier up, and ends that again."""

    def __init__(self) -> None:
        # One that has started already: starting takes longer than what is to be measured.
        self._tc = subprocess.Popen(["tc", "-batch", "-"], stdin=subprocess.PIPE, text=True)

    def put(self, nic: int, is_on: bool) -> float:
        """Put the hole into the wire of `nic`, or take it out; returns when."""
        assert self._tc.stdin is not None
        now = time.monotonic()
        for node in range(NODES):
            where = f"dev n{node}r{nic} root"
            line = f"qdisc replace {where} netem loss 100%" if is_on else f"qdisc del {where}"
            self._tc.stdin.write(line + "\n")
        self._tc.stdin.flush()
        return now

    def close(self) -> None:
        """End tc, which must have liked everything."""
        assert self._tc.stdin is not None
        self._tc.stdin.close()
        assert self._tc.wait(30) == 0


class Run:
    """One rank's communicator and what it has done with it."""

    def __init__(self, comm: r2ccl.Communicator) -> None:
        self.comm = comm
        self.nsums = 0
        self.notes: list[dict[str, Any]] = []
        #: Rails of RDMA come after those of TCP.
        self.first = len(paths_of(comm)) // (comm.nranks - 1) - NICS

    def allreduce(self, times: int = 1) -> None:
        """Sum, and check every element."""
        for _ in range(times):
            self.nsums += 1
            parts = [
                np.random.default_rng((self.nsums, rank)).integers(0, 999, COUNT)
                for rank in range(self.comm.nranks)
            ]
            x = parts[self.comm.rank].astype(np.float32)
            self.comm.allreduce(x)
            assert np.array_equal(x, sum(parts)), f"sum {self.nsums} is wrong"

    def cut_and_mend(self, seed: int) -> None:
        """A random NIC dies while a sum is under way, and comes back."""
        chance = random.Random(seed)
        node, nic = chance.randrange(NODES), chance.randrange(NICS)
        before = len(self.comm.repairs())
        timer = threading.Timer(chance.uniform(0.02, 0.5), set_link, (node, nic, False))
        if self.comm.rank == 0:
            timer.start()
        self.allreduce(4)
        if self.comm.rank == 0:
            timer.join()
        self.comm.barrier()
        self.note("cut", before, nic=nic, node=node)
        self.mend(node, nic)

    def swallow_and_mend(self, hole: Hole, seed: int) -> None:
        """A random wire swallows everything from some moment of a sum on, and is whole again."""
        chance = random.Random(seed)
        nic = chance.randrange(NICS)
        before = len(self.comm.repairs())
        began: list[float] = []
        timer = threading.Timer(
            chance.uniform(0.02, 0.5), lambda: began.append(hole.put(nic, True))
        )
        if self.comm.rank == 0:
            timer.start()
        self.allreduce(8)
        if self.comm.rank == 0:
            timer.join()
        self.comm.barrier()
        self.note("swallowed", before, nic=nic, began_s=began)
        if self.comm.rank == 0:
            hole.put(nic, False)
            self.until(lambda: all(state == "up" for state in paths_of(self.comm).values()))
        self.comm.barrier()

    def mend(self, node: int, *nics: int) -> None:
        """NICs come back; wait until their rails are used again."""
        if self.comm.rank == 0:
            for nic in nics:
                set_link(node, nic, True)
            self.until(lambda: all(state == "up" for state in paths_of(self.comm).values()))
        self.comm.barrier()

    def mend_only(self, node: int, nic: int) -> None:
        """One NIC comes back while another stays down."""
        if self.comm.rank == 0:
            set_link(node, nic, True)
            self.until(lambda: self.first + nic in self.rails_up())
        self.comm.barrier()

    def cut(self, node: int, *nics: int) -> None:
        """NICs die between two sums."""
        before = len(self.comm.repairs())
        if self.comm.rank == 0:
            for nic in nics:
                set_link(node, nic, False)
            down = {self.first + nic for nic in nics}
            self.until(lambda: not down & self.rails_up())
        self.comm.barrier()
        self.allreduce(2)
        self.note("cut", before, nic=list(nics), node=node)

    def rails_up(self) -> set[int]:
        """Rails of which a path to the other node is up."""
        return {
            rail
            for (peer, rail), state in paths_of(self.comm).items()
            if state == "up" and peer >= self.comm.nranks // NODES
        }

    def routes(self) -> list[int]:
        """Return the rails that carry the channels to the other node now."""
        senders = self.comm._engine._links.senders
        far = self.comm.nranks // NODES
        return sorted(
            {link.route.rail - self.first for (peer, _), link in senders.items()
             if peer >= far and link.route is not None}
        )  # fmt: skip

    def until(self, is_so: Any) -> None:
        give_up = time.monotonic() + 40
        while not is_so():
            assert time.monotonic() < give_up, paths_of(self.comm)
            time.sleep(0.02)

    def note(self, what: str, before: int, **more: Any) -> None:
        """Write down the repairs since `before` that are over, as this rank saw them."""
        self.until(lambda: not {"fencing", "fenced"} & set(paths_of(self.comm).values()))
        repairs = [
            {
                "rail": repair.rail - self.first,
                "cause": repair.cause,
                "failed_s": repair.failed_s,
                "fence_ms": 1e3 * (repair.fenced_s - repair.failed_s),
                "resume_ms": 1e3 * (repair.resumed_s - repair.failed_s),
                "moved": {k: to - self.first for k, to in repair.moved.items()},
                "nbytes_replayed": repair.nbytes_replayed,
            }
            for repair in self.comm.repairs()[before:]
            if repair.resumed_s  # else its evidence came just now
        ]
        self.notes.append({"what": what, "repairs": repairs, "routes": self.routes(), **more})


def paths_of(comm: r2ccl.Communicator) -> dict[Any, str]:
    """Return the state of every path of this rank."""
    return {key: path.state.value for key, path in comm._engine._links.on_rails.items()}


def random_cuts(run: Run, rounds: int) -> None:
    """A NIC dies in every round, at either side."""
    for seed in range(rounds):
        run.cut_and_mend(seed)


def random_swallows(run: Run, rounds: int) -> None:
    """A wire becomes a black hole in every round."""
    hole = Hole()
    for seed in range(rounds):
        run.swallow_and_mend(hole, seed)
    hole.close()


def several(run: Run, rounds: int) -> None:
    """Two NICs die one after another, the first comes back, the third dies; then all mend."""
    run.cut(0, 0)
    run.cut(0, 1)
    run.mend_only(0, 0)
    run.cut(0, 2)
    run.mend(0, 1, 2)


def everything(run: Run, rounds: int) -> None:
    """All RDMA NICs of a node die: TCP goes on; they come back: RDMA takes over."""
    run.cut(0, *range(NICS))
    run.mend(0, *range(NICS))
    before = len(run.comm.repairs())
    run.allreduce(2)
    run.note("mended", before)


def main() -> None:
    """Run the scenario that is named."""
    scenario, rounds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    node = int(os.environ["RANK"]) * NODES // int(os.environ["WORLD_SIZE"])
    os.environ["R2CC_HCA"] = "=" + ",".join(f"rxe_n{node}r{nic}" for nic in range(NICS))
    with r2ccl.init(**PATIENCE) as comm:
        run = Run(comm)
        run.allreduce()
        SCENARIOS[scenario](run, rounds)
        run.allreduce()
        written = {"nsums": run.nsums, "notes": run.notes}
        (folder / f"{comm.rank}.json").write_text(json.dumps(written))


SCENARIOS = {
    "random": random_cuts,
    "swallow": random_swallows,
    "several": several,
    "everything": everything,
}

if __name__ == "__main__":
    main()
