"""The lab itself: builds the cluster, runs programs on it, breaks it, counts its bytes.

Puts the other modules of this package together and adds no mechanism of its own. Invariant: when a
`Lab` is closed, or its owner dies, nothing of it is left on the machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from r2ccl.errors import InvalidArgument
from r2ccl.testing.fault_plan import FaultPlan
from r2ccl.testing.faults import Action, Fault, Firing
from r2ccl.testing.netlab import fabric
from r2ccl.testing.netlab.driver import Driver, PlanRun
from r2ccl.testing.netlab.fabric import LabShape
from r2ccl.testing.netlab.injector import Injector
from r2ccl.testing.netlab.namespaces import (
    LabError,
    NamespaceSet,
    inside,
    run_batch,
    write_sysctls,
)
from r2ccl.testing.netlab.nicfaults import NicFaults
from r2ccl.testing.netlab.ranks import LabJob, RankProcess, RankResult, rank_environment, spawn

_T = TypeVar("_T")

#: BBR, where it is the machine's default, reaches only 80-94 % of a shaped rate. A namespace may
#: only choose what the machine allows everybody; reno is always among those.
_CONGESTION_CONTROL = ("cubic", "reno")

_PROC_NET_DEV = "/proc/thread-self/net/dev"

_SWITCH = "sw"


class Lab:
    """A cluster of network namespaces on this machine.

    Nodes with `rails` shaped NICs each, real TCP, and faults on request. Needs root, or root in a
    user namespace (see `ensure_privileged`). A context manager; several labs may live at once.

    Parameters
    ----------
    **shape
        The fields of `LabShape`: ``nodes``, ``rails``, ``rate``, ``fabric``, ``mtu``, ``burst``,
        ``latency``, ``buffer``, ``ranks_per_node``.

    Raises
    ------
    InvalidArgument
        A field is out of range.
    LabError
        The machine does not allow it or lacks a tool.

    Examples
    --------
    >>> with Lab(nodes=2, rails=2) as lab:  # doctest: +SKIP
    ...     plan = FaultPlan([Fault.parse("nic_down:node=1,rail=0,at_op=3")])
    ...     results = lab.run([sys.executable, "job.py"], plan=plan, timeout_s=60)
    """

    def __init__(self, **shape: Any) -> None:
        self.shape = LabShape(**shape)
        self._job: LabJob | None = None
        self._stack = contextlib.ExitStack()
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise

    def _build(self) -> None:
        nodes = [f"n{node}" for node in range(self.shape.nodes)]
        self._set = NamespaceSet([_SWITCH, *nodes])
        self._stack.callback(self._set.close)
        self._switch = self._set.namespaces[_SWITCH]
        self._nodes = [self._set.namespaces[node] for node in nodes]
        self._wire()
        faults = NicFaults(self.shape, self._switch, self._nodes)
        self._stack.callback(faults.close)
        # Opened inside, the file shows that namespace's devices for as long as it stays open.
        self._counters = inside(self._switch, lambda: os.open(_PROC_NET_DEV, os.O_RDONLY))
        self._stack.callback(os.close, self._counters)
        self._secret = self._set.directory / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(32))
        self._driver = Driver()
        self._stack.callback(self._driver.close)
        self._injector = Injector(self.shape, faults, self._driver, lambda: self._job)
        self._stack.callback(self._end_job)

    def _wire(self) -> None:
        shape = self.shape
        inside(self._switch, lambda: write_sysctls(fabric.SWITCH_SYSCTLS))
        run_batch(["ip", "-n", self._switch], fabric.switch_lines(shape, self._nodes))
        rails = range(shape.rails)
        ports = (
            fabric.port_shaper(shape, node, rail) for node in range(shape.nodes) for rail in rails
        )
        run_batch(["tc", "-n", self._switch], ports)
        for node, namespace in enumerate(self._nodes):
            inside(namespace, lambda: write_sysctls(fabric.NODE_SYSCTLS))
            self.congestion_control = inside(namespace, _choose_congestion_control)
            run_batch(["ip", "-n", namespace], fabric.node_lines(shape, node))
            nics = (fabric.nic_shaper(shape, rail) for rail in rails)
            run_batch(["tc", "-n", namespace], nics)

    @property
    def name(self) -> str:
        """Prefix of the lab's namespaces."""
        return self._set.name

    def namespace(self, node: int) -> str:
        """Name of a node's namespace, for ``ip netns exec``."""
        return self._nodes[node]

    def inside(self, node: int, function: Callable[[], _T]) -> _T:
        """Call `function` in a thread inside a node; sockets it makes stay in that node."""
        return inside(self._nodes[node], function)

    def close(self) -> None:
        """End what runs and remove the lab; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        plan: FaultPlan | None = None,
        timeout_s: float = 120.0,
        sink: Callable[[str], None] | None = None,
    ) -> list[RankResult]:
        """Run a program as `ranks_per_node` ranks on every node and wait for all of them.

        Faults stay in force after the run unless they undo themselves; see `restore`.

        Parameters
        ----------
        argv : sequence of str
            The program; every rank runs the same, with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
            ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and the ``R2CC_*`` settings of its node.
        env : mapping, optional
            Added to this process's environment and the lab's; wins over both.
        plan : FaultPlan, optional
            What goes wrong; `plan.fired` says afterwards what did, and when.
        timeout_s : float
            Ranks that still run then are ended.
        sink : callable, optional
            Takes each line of output, already prefixed with its node; printed unless given.

        Returns
        -------
        list of RankResult
            In order of rank.

        Raises
        ------
        InvalidArgument
            The plan does not fit the lab or has been used.
        LabError
            A fault of the plan could not be applied.
        """
        take = sink or _print_line
        with self._start(argv, env, plan, is_interactive=False) as job:
            results = job.stream(timeout_s, lambda rank, line: take(self._prefixed(rank, line)))
        self.raise_errors()
        return results

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        plan: FaultPlan | None = None,
    ) -> LabJob:
        """Start a program as `run` does, with pipes to each rank's stdin and stdout.

        The plan's clock starts here. One job at a time; close it before the next.
        """
        return self._start(argv, env, plan, is_interactive=True)

    def apply(self, fault: Fault) -> Firing:
        """Apply a fault now, whatever its trigger; its `duration_s` counts from here.

        Returns
        -------
        Firing
            When: CLOCK_MONOTONIC seconds before and after; `index` is -1.

        Raises
        ------
        InvalidArgument
            It names what does not exist, or no job runs whose rank could be stopped or killed.
        LabError
            The kernel refused.
        """
        return self._injector.apply(fault)

    def restore(self, node: int | None = None, rail: int | None = None) -> Firing:
        """Take back every fault of a NIC, of a node, of a rail or, with neither, of all NICs."""
        return self.apply(Fault(action=Action.RESTORE, node=node, rail=rail))

    def counters(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the bytes each NIC has sent and received.

        Counted at its switch port, with link headers (one a segment as TCP hands it down, which
        is up to 64 KiB). Cheap enough for tens of samples a second.

        Returns
        -------
        dict
            ``(node, rail)`` to ``(tx_bytes, rx_bytes)``.
        """
        found = {}
        for line in _read_whole(self._counters).decode().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            # What the port received, the NIC has sent. proc(5): 8 receive columns, then transmit.
            found[name.strip()] = (int(fields[0]), int(fields[8]))
        return {
            (node, rail): found[fabric.port_name(node, rail)]
            for node in range(self.shape.nodes)
            for rail in range(self.shape.rails)
        }

    def raise_errors(self) -> None:
        """Raise LabError where a fault could not be applied since the last call."""
        errors, self._driver.errors = self._driver.errors, []
        if errors:
            raise LabError(
                f"{len(errors)} fault(s) could not be applied; the first: {errors[0]!r}"
            ) from errors[0]

    def _start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        plan: FaultPlan | None,
        *,
        is_interactive: bool,
    ) -> LabJob:
        if self._job is not None:
            raise InvalidArgument("netlab: a job is running in this lab; close it first")
        with contextlib.ExitStack() as on_failure:
            run = self._prepare(plan) if plan is not None else None
            job = self._job = LabJob(lambda: self._forget(run))
            on_failure.callback(job.close)
            for rank in range(self.shape.nranks):
                node, local = divmod(rank, self.shape.ranks_per_node)
                values = {
                    **os.environ,
                    **rank_environment(self.shape, node, local, self._secret),
                    **(run.environment if run else {}),
                    **(env or {}),
                }
                popen = spawn(self._nodes[node], argv, values, is_interactive=is_interactive)
                job.ranks.append(RankProcess(rank, node, popen))
            if run:
                self._driver.begin(run)
            on_failure.pop_all()
        return job

    def _prepare(self, plan: FaultPlan) -> PlanRun:
        shape = self.shape
        plan.check(nodes=shape.nodes, rails=shape.rails, ranks_per_node=shape.ranks_per_node)
        if plan.fired:
            raise InvalidArgument(
                "netlab: this fault plan has been used; FaultPlan(plan.faults) is a fresh one"
            )
        return PlanRun(plan, self._set.directory, shape.ranks_per_node, self.apply)

    def _forget(self, run: PlanRun | None) -> None:
        self._job = None
        if run:
            self._driver.end(run)

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.close()

    def _prefixed(self, rank: int, line: str) -> str:
        node = rank // self.shape.ranks_per_node
        who = f"n{node}" if self.shape.ranks_per_node == 1 else f"n{node} r{rank}"
        return f"[{who}] {line}"


def _choose_congestion_control() -> str:
    """Set the first of `_CONGESTION_CONTROL` that the calling thread's namespace allows."""
    refusals = []
    for name in _CONGESTION_CONTROL:
        try:
            write_sysctls({"net/ipv4/tcp_congestion_control": name})
        except LabError as exc:
            refusals.append(str(exc))
        else:
            return name
    raise LabError("; ".join(refusals))


def _read_whole(descriptor: int) -> bytes:
    """Read a /proc file from its start; the kernel hands such files out a page at a time."""
    data = b""
    while piece := os.pread(descriptor, 1 << 16, len(data)):
        data += piece
    return data


def _print_line(line: str) -> None:
    print(line, flush=True)


__all__ = ["Lab"]
