"""`Lab`: builds the cluster, runs programs on it, injects faults, and counts bytes per NIC.

When a `Lab` is closed, or the process that made it dies, all namespaces, processes and files of the
lab are removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
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
from r2ccl.testing.netlab.ranks import (
    LabJob,
    RankProcess,
    RankResult,
    check_argv,
    rank_environment,
    spawn,
)

_T = TypeVar("_T")

#: Congestion controls in order of preference. BBR, the default of some machines, reaches only
#: 80-94 % of a shaped rate. A namespace may only choose those that the machine allows to all users,
#: which always include reno.
_CONGESTION_CONTROL = ("cubic", "reno")

_PROC_NET_DEV = "/proc/thread-self/net/dev"

_SWITCH = "sw"


class Lab:
    """Cluster of network namespaces on this machine, with real TCP over shaped NICs.

    A lab needs root, or root in a user namespace (see `ensure_privileged`). It is a context
    manager, and several labs may exist at once.

    Parameters
    ----------
    **shape
        Fields of `LabShape`, all optional: ``nodes``, ``rails``, ``rate``, ``fabric``, ``mtu``,
        ``burst``, ``latency``, ``buffer``, ``ranks_per_node``.

    Raises
    ------
    InvalidArgument
        If a field is out of range or malformed.
    LabError
        If this machine or this user's privileges do not allow the lab, or a program is missing.

    Attributes
    ----------
    shape : LabShape
        Size and properties of the lab.
    congestion_control : str
        TCP congestion control of the nodes, as the kernel names it.

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
        # Opened inside the namespace, the file shows that namespace's devices until it is closed.
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
        """Prefix of the names of the lab's namespaces."""
        return self._set.name

    def namespace(self, node: int) -> str:
        """Return the name of a node's namespace, for ``ip netns exec``."""
        return self._nodes[node]

    def inside(self, node: int, function: Callable[[], _T]) -> _T:
        """Call `function` in a thread inside a node and return its result.

        Sockets that the function creates belong to that node for their whole life. If the function
        raises an exception, `inside` raises it too.
        """
        return inside(self._nodes[node], function)

    def close(self) -> None:
        """End the running job and remove the lab; a second call does nothing.

        Raises
        ------
        LabError
            If a process of the job does not end, the thread that applies the faults does not
            answer, or the namespaces are not removed in time.
        """
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

        NIC faults without a `duration_s` stay in force after the run; `restore` undoes them.

        Parameters
        ----------
        argv : sequence of str
            The program and its arguments, the same for every rank. The lab sets ``RANK``,
            ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``MASTER_ADDR``,
            ``MASTER_PORT`` and the ``R2CC_*`` settings of the node in the environment of each rank.
        env : mapping, optional
            Environment variables that override the variables of this process and of the lab.
        plan : FaultPlan, optional
            Faults to inject; afterwards `plan.fired` lists the faults that fired, with their times.
        timeout_s : float
            Seconds after which ranks that still run are ended; their results have `is_timed_out`.
        sink : callable, optional
            Called with each line of output, prefixed with the node and, if nodes have several
            ranks, the rank. By default lines are printed on standard output.

        Returns
        -------
        list of RankResult
            In order of rank.

        Raises
        ------
        InvalidArgument
            If `argv` is a string, the plan does not fit the lab, a fault of the plan has fired
            before, or a job is running.
        LabError
            If the socket for the reports of the ranks cannot be bound, a fault could not be applied
            or undone, a rank could not be ended, or the thread that applies the faults does not
            answer in time. The results of the ranks are then lost.
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
        """Start a program as `run` does, but with pipes to each rank's stdin and stdout.

        The call returns when all ranks are started; `at_s` of a fault counts from this time. A lab
        runs one job at a time: close the returned job before starting the next. `raise_errors`
        reports faults that could not be applied.

        Raises
        ------
        InvalidArgument
            If `argv` is a string, the plan does not fit the lab, a fault of the plan has fired
            before, or a job is running.
        LabError
            If the socket for the reports of the ranks cannot be bound, or the thread that applies
            the faults does not answer in time.
        """
        return self._start(argv, env, plan, is_interactive=True)

    def apply(self, fault: Fault) -> Firing:
        """Apply a fault now and ignore its trigger; its `duration_s` counts from this call.

        The fault is in force when the call returns.

        Returns
        -------
        Firing
            Record with the times just before and after the change; its `index` is -1.

        Raises
        ------
        InvalidArgument
            If the fault names a node, rail or rank that does not exist, or stops or kills a rank
            while no job runs.
        LabError
            If the kernel refuses the change.
        """
        return self._injector.apply(fault)

    def restore(self, node: int | None = None, rail: int | None = None) -> Firing:
        """Undo the NIC faults of one NIC, of a node, of a rail or, with no argument, of all NICs.

        Stopped ranks stay stopped. The result and the errors are those of `apply`.
        """
        return self.apply(Fault(action=Action.RESTORE, node=node, rail=rail))

    def counters(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the number of bytes that each NIC has sent and received.

        The bytes are counted at the switch port, from the start of the lab. They include one link
        header for each segment of up to 64 KiB that TCP passes to the NIC. The call is fast enough
        for tens of samples per second.

        Returns
        -------
        dict
            Maps ``(node, rail)`` to ``(tx_bytes, rx_bytes)`` of the NIC.
        """
        found = {}
        for line in _read_whole(self._counters).decode().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            # The port receives what the NIC sends. proc(5): 8 receive columns, then transmit.
            found[name.strip()] = (int(fields[0]), int(fields[8]))
        return {
            (node, rail): found[fabric.port_name(node, rail)]
            for node in range(self.shape.nodes)
            for rail in range(self.shape.rails)
        }

    def raise_errors(self) -> None:
        """Raise LabError if a fault could not be applied or undone since the last call."""
        errors, self._driver.errors = self._driver.errors, []
        if errors:
            raise LabError(
                f"{len(errors)} fault(s) could not be applied or undone; the first: {errors[0]!r}"
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
            raise InvalidArgument("a job is running in this lab; close the job first")
        check_argv(argv)
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
        plan.check_unused()
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
    """Set the first of `_CONGESTION_CONTROL` that this namespace allows; return its name."""
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
    """Read a /proc file from start to end, with several reads: a read returns at most a page."""
    data = b""
    while piece := os.pread(descriptor, 1 << 16, len(data)):
        data += piece
    return data


def _print_line(line: str) -> None:
    try:
        print(line, flush=True)
    except UnicodeEncodeError:  # the locale of this process lacks a character of the program
        encoding = sys.stdout.encoding
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


__all__ = ["Lab"]
