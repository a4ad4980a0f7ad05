"""Fault plans: what is accepted, what is refused and how, and when a reporter fires."""

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from r2ccl.errors import InvalidArgument, TransportTimeout
from r2ccl.testing import Action, Fault, FaultPlan, FaultReporter, fail_at, reporter_from_env
from r2ccl.testing.faults_reporter import Applied, Due, LabClient
from r2ccl.testing.reporting import ReportingTransport
from r2ccl.transport.base import Event, Failed, Frame
from r2ccl.types import PathKey


def nic_down(**fields: object) -> Fault:
    return Fault(**{"action": Action.NIC_DOWN, "node": 1, "rail": 2, **fields})  # type: ignore[arg-type]


def test_command_line_form() -> None:
    assert Fault.parse("nic_down:node=1,rail=2,at_op=3,at_step=5") == nic_down(at_op=3, at_step=5)
    assert Fault.parse("slow: node=0, rail=1, rate=20mbit, at_s=0.5").rate == "20mbit"
    assert Fault.parse("restore:at_s=2").node is None


def test_an_action_may_be_spelt_in_python() -> None:
    assert Fault(action="restore", at_s=1).action is Action.RESTORE  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"unknown fault action 'melt'; allowed: nic_down"):
        Fault(action="melt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("melt:node=1", "melt.*actions: nic_down"),
        ("nic_down:node=1", "needs rail"),
        ("kill:rank=1,rail=0", "does not take rail"),
        ("nic_down:node=1,rail=-1", "rail=-1; it must be an integer, 0 or more"),
        ("nic_down:node=1,rail=2,at_s=nan", "at_s=nan; it must be 0 or more"),
        ("nic_down:node=1,rail=2,at_s=inf", "at_s=inf; it must be 0 or more and less than 1e6"),
        ("nic_down:node=1,rail=2,at_s=1,at_op=1", "give only one"),
        ("nic_down:node=1,rail=2,at_step=1", "at_step without at_op"),
        ("nic_down:node=1,rail=2,duration_s=0", "more than 0"),
        ("nic_down:node=1,rail=two", "int"),
        ("nic_down:node=1,node=2", "twice"),
        ("nic_down:node", "not name=value"),
        ("nic_down:node=1,rail=2,colour=red", "colour"),
        ("isolate:node=1,peer=1,rail=0", "from itself"),
        ("slow:node=1,rail=0,rate=fast", "like 20mbit"),
        ("stop:rank=1", "needs duration_s"),
    ],
)
def test_malformed_faults_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Fault.parse(text)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("node", "1", "an integer, 0 or more"),
        ("node", 1.5, "an integer, 0 or more"),
        ("at_s", "1", "0 or more and less than 1e6 seconds"),
        ("duration_s", "1", "more than 0 and less than 1e6 seconds"),
        ("rate", 20, "write it like 20mbit"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(field: str, value: object, allowed: str) -> None:
    fields: dict[str, Any] = {"node": 0, "rail": 0, "rate": "20mbit", field: value}
    with pytest.raises(InvalidArgument, match=f"has {field}={value!r}; (it must be )?{allowed}"):
        Fault(action=Action.SLOW, **fields)


def test_numbers_of_numpy_are_fields() -> None:
    fault = nic_down(node=np.int64(1), at_s=np.float32(1))
    assert FaultPlan([fault]).to_json() == FaultPlan([nic_down(node=1, at_s=1.0)]).to_json()


def test_a_plan_consists_of_faults() -> None:
    with pytest.raises(InvalidArgument, match=r"fault plan: 3 is not a Fault; .*Fault\.parse"):
        FaultPlan([3])  # type: ignore[list-item]


def test_json_round_trip(tmp_path: Path) -> None:
    plan = FaultPlan([nic_down(at_op=3), Fault(action=Action.KILL, rank=2, at_s=1.5)])
    path = tmp_path / "plan.json"
    path.write_bytes(plan.to_json())
    assert FaultPlan.load(path).faults == plan.faults
    assert b"duration_s" not in plan.to_json()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "fault plan"),
        (b"[{}]", "action"),
        (b'[{"action": "nic_down", "node": 1, "rail": 2}]', "no trigger"),
        (b'[{"action": "nic_down", "at_s": 1}]', "needs node, rail"),
        (b'[{"action": "kill", "rank": 1, "at_s": 1, "hue": 2}]', "hue"),
    ],
)
def test_malformed_plans_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        FaultPlan.from_json(data)


def test_missing_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        FaultPlan.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "fault",
    [
        nic_down(node=4, at_s=1),
        nic_down(rail=4, at_s=1),
        Fault(action=Action.KILL, rank=8, at_s=1),
        Fault(action=Action.ISOLATE, node=0, peer=4, rail=0, at_s=1),
    ],
)
def test_a_fault_must_fit_the_lab(fault: Fault) -> None:
    with pytest.raises(InvalidArgument, match="does not exist; allowed is 0 to"):
        FaultPlan([fault]).check(nodes=4, rails=4, ranks_per_node=2)


def test_record_and_assert_all_fired() -> None:
    plan = FaultPlan([nic_down(at_op=1), nic_down(at_op=2)])
    firing = plan.record(1, 10.0, 10.001)
    assert firing.fault.at_op == 2
    with pytest.raises(AssertionError, match=r"1 of 2 .*at_op=1"):
        plan.assert_all_fired()
    plan.record(0, 11.0, 11.001)
    plan.assert_all_fired()


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, due: Due) -> None:
        self.calls.append((due.index, due.op, due.step))


def walk(plan: FaultPlan, rank: int, steps_of_op: list[int]) -> list[tuple[int, int, int]]:
    recorder = Recorder()
    reporter = FaultReporter(plan, rank, recorder)
    for op, steps in enumerate(steps_of_op):
        for step in range(steps):
            reporter.at(op, step)
    return recorder.calls


def test_a_rank_answers_for_the_faults_it_triggers_and_no_others() -> None:
    for rank, is_missed in ((1, True), (0, False)):
        with contextlib.ExitStack() as stack:
            if is_missed:
                stack.enter_context(pytest.raises(AssertionError, match="did not fire"))
            with fail_at(rank=1, rail=0, op=3, step=2) as plan:
                FaultReporter(plan, rank, lambda due: None).at(3, 1)
    with fail_at(rank=1, rail=0, op=3, step=2) as plan:
        FaultReporter(plan, 1, lambda due: None).at(3, 2)
    (firing,) = plan.fired
    assert firing.time_s <= firing.applied_s


def test_a_plan_nobody_was_given_did_not_fire() -> None:
    with pytest.raises(AssertionError, match="rail=0"), fail_at(rank=1, rail=0, op=3):
        pass


def test_what_went_wrong_before_is_not_hidden() -> None:
    with pytest.raises(KeyError), fail_at(rank=1, rail=0, op=3):
        raise KeyError


def test_reporter_fires_its_own_faults_at_their_step() -> None:
    plan = FaultPlan(
        [
            nic_down(at_op=2, at_step=1),
            nic_down(at_op=1),
            nic_down(rank=0, at_op=1),
            nic_down(at_op=2, at_step=1),
            nic_down(at_s=0.0),
        ]
    )
    assert walk(plan, 1, [3, 3, 3]) == [(1, 1, 0), (0, 2, 1), (3, 2, 1)]
    assert walk(plan, 0, [3, 3, 3]) == [(2, 1, 0)]
    assert walk(plan, 3, [3, 3, 3]) == []


def test_reporter_never_strikes_a_later_operation() -> None:
    plan = FaultPlan([nic_down(at_op=1, at_step=7), nic_down(at_op=2, at_step=1)])
    assert walk(plan, 1, [9, 3, 3]) == [(1, 2, 1)]


def test_reporter_fires_at_the_first_step_reported_past_its_own() -> None:
    recorder = Recorder()
    reporter = FaultReporter(FaultPlan([nic_down(at_op=1, at_step=3)]), 1, recorder)
    assert not reporter.is_done
    reporter.at(1, 0)
    reporter.at(1, 5)
    assert recorder.calls == [(0, 1, 5)]
    assert reporter.is_done


def test_environment_without_a_plan_means_no_reporter() -> None:
    assert reporter_from_env({}) is None


def test_environment_that_nobody_can_serve_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(FaultPlan([nic_down(at_op=1)]).to_json())
    env = {"R2CC_FAULT_PLAN": str(path), "RANK": "1"}
    with pytest.raises(InvalidArgument, match="r2ccl netlab"):
        reporter_from_env(env)
    with pytest.raises(InvalidArgument, match="RANK"):
        reporter_from_env({**env, "RANK": "one"})
    path.write_bytes(FaultPlan([nic_down(at_s=1.0)]).to_json())
    with pytest.raises(InvalidArgument, match="only faults with at_op"):
        reporter_from_env(env, apply=Recorder())


@pytest.mark.parametrize(("field", "value"), [("node", 2), ("rank", 5), ("rail", 3)])
def test_without_a_lab_ranks_and_rails_must_exist(tmp_path: Path, field: str, value: int) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(FaultPlan([nic_down(at_op=0, **{field: value})]).to_json())
    env = {"R2CC_FAULT_PLAN": str(path), "RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(InvalidArgument, match=f"{field} {value} does not exist"):
        reporter_from_env(env, apply=Recorder(), nrails=3)


def test_a_function_applies_faults_where_there_is_no_lab(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(FaultPlan([nic_down(at_op=0)]).to_json())
    recorder = Recorder()
    reporter = reporter_from_env({"R2CC_FAULT_PLAN": str(path), "RANK": "1"}, apply=recorder)
    assert reporter is not None
    reporter.at(0, 0)
    assert recorder.calls == [(0, 0, 0)]


PATH = PathKey(peer=1, rail=0)


class OpenTransport:
    """Transport whose paths stay open, and whose next `poll` returns `events`."""

    nrails = 1

    def __init__(self) -> None:
        self.nsent = 0
        self.events: list[Event] = []

    def open(self, path: PathKey, endpoint: object) -> None: ...

    def fence(self, path: PathKey) -> None: ...

    def is_open(self, path: PathKey) -> bool:
        return True

    def isend(self, *call: object) -> None:
        self.nsent += 1

    def poll(self, timeout_s: float) -> list[Event]:
        return self.events


def wrapped(plan: FaultPlan) -> tuple[ReportingTransport, OpenTransport]:
    inner = OpenTransport()
    transport = plan.wrap(inner, 0, 2)  # type: ignore[arg-type]
    transport.begin(1)
    transport.open(PATH, None)
    return transport, inner


def send(transport: ReportingTransport, op: int, seq: int = 0) -> None:
    transport.isend(PATH, Frame(0, seq, 0, op, 0), memoryview(b"x"), None)


def test_replays_of_older_collectives_do_not_count() -> None:
    plan = fail_at(rank=0, rail=0, op=1, step=2)
    transport, inner = wrapped(plan)
    for op, seq in ((1, 0), (1, 1), (2, 0), (2, 1), (1, 1), (2, 2)):
        assert not plan.fired
        send(transport, op, seq)
    assert len(plan.fired) == 1
    assert inner.nsent == 5


def test_a_cut_path_is_not_open_and_fails_once() -> None:
    transport, inner = wrapped(fail_at(rank=0, rail=0, op=0))
    assert transport.is_open(PATH)
    send(transport, 1)
    assert not transport.is_open(PATH)
    inner.events = [Failed(PATH, "ECONNRESET", "")]
    assert [event.status for event in transport.poll(0) if isinstance(event, Failed)] == [
        "ENETDOWN"
    ]
    transport.fence(PATH)
    send(transport, 1)
    assert not inner.nsent
    assert not transport.poll(0)
    transport.open(PATH, None)
    assert transport.is_open(PATH)
    assert transport.poll(0) == inner.events


def test_a_rank_without_a_lab_refuses_faults_at_a_time() -> None:
    with pytest.raises(InvalidArgument, match="only faults with at_op"):
        wrapped(FaultPlan([nic_down(at_s=1.0)]))


def test_a_rank_without_a_lab_undoes_no_fault() -> None:
    with pytest.raises(InvalidArgument, match="only a netlab can undo a fault after duration_s"):
        wrapped(FaultPlan([nic_down(node=0, rail=0, at_op=0, duration_s=1.0)]))


def test_a_plan_serves_one_run() -> None:
    plan = fail_at(rank=0, rail=0, op=0)
    transport, _ = wrapped(plan)
    send(transport, 1)
    with pytest.raises(InvalidArgument, match="was already used"):
        wrapped(plan)


def test_a_rank_without_a_lab_cuts_no_other_node() -> None:
    transport, _ = wrapped(FaultPlan([nic_down(rail=0, rank=0, at_op=0)]))
    with pytest.raises(InvalidArgument, match=r"rank 0: .*give it node=0"):
        send(transport, 1)
    assert transport.is_open(PATH)


@pytest.mark.parametrize(("rank", "rail"), [(0, 1), (2, 0)])
def test_a_fault_must_fit_the_job(rank: int, rail: int) -> None:
    with pytest.raises(InvalidArgument, match="does not exist; allowed is 0 to"):
        wrapped(fail_at(rank=rank, rail=rail, op=0))


def test_a_rank_without_a_lab_cuts_no_missing_rail(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(fail_at(rank=0, rail=1, op=0).to_json())
    env = {"R2CC_FAULT_PLAN": str(path), "RANK": "0"}
    inner: Any = OpenTransport()
    transport = ReportingTransport(inner, lambda cut: reporter_from_env(env, apply=cut))
    transport.begin(1)
    with pytest.raises(InvalidArgument, match=r"rank 0: .*rail 1 does not exist; allowed"):
        send(transport, 1)


def answer_one(server: socket.socket, answer: bytes, seen: list[Due]) -> None:
    client, _ = server.accept()
    with client:
        seen.append(msgspec.msgpack.decode(client.recv(4096), type=Due))
        client.send(answer)


@pytest.mark.parametrize("error", ["", "no such NIC"])
def test_lab_client_waits_for_the_answer(tmp_path: Path, error: str) -> None:
    path = str(tmp_path / "lab.sock")
    seen: list[Due] = []
    due = Due(1, 3, 5, 0, nic_down(at_op=3, at_step=5))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(5)
        server.bind(path)
        server.listen()
        answer = msgspec.msgpack.encode(Applied(error))
        thread = threading.Thread(target=answer_one, args=(server, answer, seen))
        thread.start()
        client = LabClient(path, timeout_s=5)
        if error:
            with pytest.raises(TransportTimeout, match="no such NIC"):
                client(due)
        else:
            client(due)
        thread.join(5)
    assert seen == [due]


def test_lab_client_gives_up_on_a_silent_lab(tmp_path: Path) -> None:
    path = str(tmp_path / "lab.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(TransportTimeout, match="no answer"):
            LabClient(path, timeout_s=0.05)(Due(1, 0, 0, 0, nic_down(at_op=0)))
