"""Programs in a lab: their environment, their ends, the faults applied to them, and the cleanup."""

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from r2ccl.cli import make_parser
from r2ccl.errors import InvalidArgument
from r2ccl.testing import Fault, FaultPlan
from r2ccl.testing.netlab import Lab, LabError, clean, fabric, unavailable_reason
from r2ccl.testing.netlab.namespaces import run_batch

RUN = Path("/run/netns")

#: Posts 4 operations of 5 slices each as the communicator would, and prints the time of each.
TOY_RANK = """
import os, time
from r2ccl.testing import reporter_from_env
reporter = reporter_from_env(os.environ)
for op in range(4):
    for step in range(5):
        reporter.at(op, step)
        print(op, step, time.monotonic(), reporter.is_done, flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=2, rails=2, ranks_per_node=2) as lab:
        yield lab


def await_true(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll for conditions without a descriptor, such as the removal of files."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {timeout_s} s"
        select.select([], [], [], 0.01)


def namespaces_of(name: str) -> list[str]:
    return [each.name for each in RUN.iterdir() if each.name.startswith(name)]


def quiet(_: str) -> None:
    """Drop the output; the result has it too."""


def test_output_is_shown_in_a_locale_that_lacks_a_letter(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    results = lab.run(["printf", "\u2192 \u00b5\n"])
    assert [each.returncode for each in results] == [0] * 4
    assert all(line.endswith(b" \\u2192 \xb5") for line in shown.getvalue().splitlines())


def test_ranks_find_who_and_where_they_are(lab: Lab) -> None:
    script = (
        "import json, os; from pathlib import Path;"
        "secret = Path(os.environ['R2CC_SECRET_FILE']);"
        "print(json.dumps({**os.environ, 'mode': secret.stat().st_mode & 0o777,"
        " 'secret': secret.read_text()}))"
    )
    results = lab.run([sys.executable, "-c", script], sink=quiet, env={"MINE": "1"})
    seen = [json.loads(result.output) for result in results]
    assert [each["RANK"] for each in seen] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in seen] == ["0", "1", "0", "1"]
    assert {each["WORLD_SIZE"] + each["LOCAL_WORLD_SIZE"] for each in seen} == {"42"}
    assert {each["MASTER_ADDR"] for each in seen} == {"10.0.0.1"}
    assert [each["R2CC_CONTROL_ADDRESS"][-1] for each in seen] == ["1", "1", "2", "2"]
    assert {each["R2CC_SOCKET_IFNAME"] for each in seen} == {"=rail0,rail1"}
    assert {each["mode"] for each in seen} == {0o600}
    assert {len(bytes.fromhex(each["secret"])) for each in seen} == {32}
    assert {each["MINE"] for each in seen} == {"1"}
    assert not any("R2CC_FAULT_PLAN" in each for each in seen)


def test_rails_are_discovered_inside_a_node(lab: Lab) -> None:
    script = (
        "import os; from r2ccl.config import Config; from r2ccl.topology import discover;"
        "print(*(f'{nic.name}={nic.address}' for nic in discover(Config.from_env(os.environ))))"
    )
    results = lab.run([sys.executable, "-c", script], sink=quiet)
    assert results[2].output.split() == ["rail0=10.1.0.2", "rail1=10.2.0.2"]


def test_output_streams_with_the_node_in_front(lab: Lab) -> None:
    lines: list[str] = []
    script = "echo out $RANK; echo err $RANK >&2; printf 'no newline'"
    lab.run(["sh", "-c", script], sink=lines.append)
    assert sorted(lines) == sorted(
        f"[n{rank // 2} r{rank}] {text}"
        for rank in range(4)
        for text in (f"out {rank}", f"err {rank}", "no newline")
    )


def test_ranks_that_hang_are_ended_with_their_children(lab: Lab) -> None:
    script = '[ $RANK = 1 ] || exit 3; sleep 600 & echo $!; trap "" TERM; wait; sleep 600'
    results = lab.run(["sh", "-c", script], timeout_s=0.3, sink=quiet)
    assert [result.returncode for result in results] == [3, -signal.SIGKILL, 3, 3]
    assert [result.is_timed_out for result in results] == [False, True, False, False]
    child = int(results[1].output)
    await_true(lambda: not is_running(child), "the rank's child ends")


def test_the_deadline_ends_ranks_that_never_stop_talking(lab: Lab) -> None:
    lines: list[str] = []
    results = lab.run(["yes"], timeout_s=0.3, sink=lines.append)
    assert all(result.is_timed_out for result in results)
    assert len(lines) > 100


def test_a_background_child_that_talks_does_not_hold_up_the_run(lab: Lab) -> None:
    start = time.monotonic()
    talk = "while :; do echo y; sleep 0.01; done & exit 0"
    lab.run(["sh", "-c", talk], timeout_s=30, sink=quiet)
    assert time.monotonic() - start < 20


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_interactive_ranks_talk_through_pipes(lab: Lab) -> None:
    with lab.start(["sh", "-c", "read line; echo $RANK $line"]) as job:
        with pytest.raises(InvalidArgument, match="a job is running"):
            lab.run(["true"])
        for each in job.ranks:
            assert each.popen.stdin is not None
            each.popen.stdin.write(b"hello\n")
            each.popen.stdin.flush()
        answers = [each.popen.stdout.readline() for each in job.ranks if each.popen.stdout]
        assert answers == [b"0 hello\n", b"1 hello\n", b"2 hello\n", b"3 hello\n"]
        assert [result.returncode for result in job.wait(timeout_s=10)] == [0, 0, 0, 0]


def test_faults_strike_at_their_operation_and_step(lab: Lab) -> None:
    plan = FaultPlan(
        map(
            Fault.parse,
            (
                "nic_down:node=1,rail=0,at_op=2,at_step=3",
                "slow:node=0,rail=1,rate=10mbit,at_op=1,rank=3",
                "restore:at_op=3,at_step=4",
            ),
        )
    )
    results = lab.run([sys.executable, "-c", TOY_RANK], plan=plan, sink=quiet)
    plan.assert_all_fired()
    reached = [
        {(int(op), int(step)): float(when) for op, step, when, _ in rows}
        for rows in ([line.split() for line in each.output.splitlines()] for each in results)
    ]
    fired = {firing.index: firing for firing in plan.fired}
    # (index of the fault, trigger rank, step reached before the fault, step of the fault)
    for index, rank, before, own in ((0, 2, (2, 2), (2, 3)), (1, 3, (0, 4), (1, 0))):
        firing = fired[index]
        assert reached[rank][before] < firing.time_s < firing.applied_s < reached[rank][own]
    assert [each.returncode for each in results] == [0, 0, 0, 0]
    assert all(each.output.split()[-1] == "True" for each in results)


def test_a_step_that_is_never_reached_is_reported(lab: Lab) -> None:
    plan = FaultPlan([Fault.parse("nic_down:node=1,rail=0,at_op=2,at_step=9")])
    lab.run([sys.executable, "-c", TOY_RANK], plan=plan, sink=quiet)
    with pytest.raises(AssertionError, match=r"did not fire.*at_step=9"):
        plan.assert_all_fired()
    with pytest.raises(InvalidArgument, match="rank 4 does not exist"):
        lab.run(["true"], plan=FaultPlan([Fault.parse("kill:rank=4,at_s=0")]))


def test_a_used_plan_is_refused(lab: Lab) -> None:
    plan = FaultPlan([Fault.parse("restore:at_s=0")])
    lab.run(["sleep", "0.2"], plan=plan)
    plan.assert_all_fired()
    with pytest.raises(InvalidArgument, match="was already used"):
        lab.run(["true"], plan=plan)


def test_kill_and_stop_by_time_and_by_step(lab: Lab) -> None:
    plan = FaultPlan(
        map(Fault.parse, ("kill:rank=1,at_op=1,at_step=2", "stop:rank=2,duration_s=0.3,at_op=2"))
    )
    results = lab.run([sys.executable, "-c", TOY_RANK], plan=plan, sink=quiet)
    plan.assert_all_fired()
    assert [each.returncode for each in results] == [0, -signal.SIGKILL, 0, 0]
    assert results[1].output.splitlines()[-1].startswith("1 1 ")
    times = [float(line.split()[2]) for line in results[2].output.splitlines()]
    assert times[10] - times[9] >= 0.3


def test_a_timed_fault_strikes_in_its_time_and_not_after_the_run(lab: Lab) -> None:
    plan = FaultPlan(map(Fault.parse, ("kill:rank=0,at_s=0.2", "nic_down:node=0,rail=0,at_s=5")))
    start = time.monotonic()
    results = lab.run(["sh", "-c", "[ $RANK != 0 ] || exec sleep 60"], plan=plan)
    assert [each.returncode for each in results] == [-signal.SIGKILL, 0, 0, 0]
    assert plan.fired[0].time_s >= start + 0.2
    assert [fault.at_s for fault in plan.pending()] == [5]


def test_a_fault_that_cannot_be_applied_fails_rank_and_run(lab: Lab) -> None:
    plan = FaultPlan(
        map(
            Fault.parse,
            ("slow:node=0,rail=0,rate=20mbit,at_op=0", "nic_down:node=1,rail=1,at_op=1"),
        )
    )
    tc = ["tc", "-n", lab.namespace(0)]
    run_batch(tc, ["qdisc del dev rail0 root"])
    try:
        with pytest.raises(LabError, match=r"1 fault.*slow|1 fault.*tc"):
            lab.run([sys.executable, "-c", TOY_RANK], plan=plan, sink=quiet)
        assert plan.pending() == [plan.faults[0]]
    finally:
        run_batch(tc, [fabric.nic_shaper(lab.shape, 0)])
        lab.restore()


def test_labs_live_side_by_side_and_leave_nothing() -> None:
    with Lab(nodes=2, rails=1) as one, Lab(nodes=2, rails=1) as two:
        assert one.name != two.name
        one.apply(Fault.parse("nic_down:node=0,rail=0"))
        for lab, state in ((one, "DOWN"), (two, "UP")):
            (first, _) = lab.run(["ip", "-br", "link", "show", "rail0"], sink=quiet)
            assert first.output.split()[1] == state
        names = (one.name, two.name)
    assert [namespaces_of(name) for name in names] == [[], []]
    one.close()


def test_a_lab_whose_guard_was_killed_still_cleans_up() -> None:
    with Lab(nodes=1, rails=1) as lab:
        os.kill(lab._set._guard.pid, signal.SIGKILL)
    assert namespaces_of(lab.name) == []


def test_a_child_with_the_guards_pipe_does_not_hold_up_closing() -> None:
    lab = Lab(nodes=1, rails=1)
    pipe = lab._set._guard.stdin
    assert pipe is not None
    with subprocess.Popen(["sleep", "60"], pass_fds=[pipe.fileno()]) as child:
        lab.close()
        assert namespaces_of(lab.name) == []
        child.kill()


def test_counters_of_a_larger_lab_are_all_there() -> None:
    with Lab(nodes=8, rails=8) as lab:
        assert len(lab.counters()) == 64


OWNER = """
import sys
from r2ccl.testing.netlab import Lab
lab = Lab(nodes=1, rails=1)
job = lab.start(["sleep", "600"])
print(lab.name, lab._set.directory, job.ranks[0].pid, lab._set._guard.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_guard_killed", [False, True])
def test_nothing_outlives_a_killed_owner(is_guard_killed: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        name, directory, rank, guard = owner.stdout.readline().split()
        assert len(namespaces_of(name)) == 2
        if is_guard_killed:
            os.kill(int(guard), signal.SIGKILL)
        assert name not in clean(), "its owner lives"
        owner.kill()
        owner.wait()
        if is_guard_killed:
            assert clean() == [name]
        await_true(
            lambda: (
                not namespaces_of(name)
                and not Path(directory).exists()
                and not is_running(int(rank))
            ),
            "the guard removes the lab",
        )


def cli(*arguments: str) -> int:
    parser = make_parser(["netlab"])
    args = parser.parse_args(["netlab", *arguments])
    status: int = args.run(args)
    return status


SMALL = ("--nodes", "2", "--rails", "1")
#: A fault after the end of each program below.
LATE = ("--fault", "nic_down:node=1,rail=0,at_s=600")


def test_command_line_runs_a_plan_and_reports_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(FaultPlan([Fault.parse("slow:node=0,rail=0,rate=1mbit,at_op=1")]).to_json())
    faults = ("--plan", str(path), "--fault", "nic_down:node=1,rail=0,at_op=0,at_step=1")
    results = tmp_path / "results.json"
    options = (*faults, "--json", str(results))
    assert cli(*SMALL, *options, "--", sys.executable, "-c", TOY_RANK) == 0
    out, err = capfd.readouterr()
    assert "[n1] 3 4 " in out
    assert err.count("monotonic") == 2
    assert "did not fire" not in err
    found = json.loads(results.read_text())
    assert (found["status"], found["pending"], found["lab"]["nodes"]) == (0, [], 2)
    assert [(each["node"], each["status"]) for each in found["ranks"]] == [(0, 0), (1, 0)]
    fired = {each["fault"].partition(":")[0] for each in found["faults"]}
    assert fired == {"slow", "nic_down"}
    assert all(0 < each["at_s"] <= each["applied_s"] for each in found["faults"])


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--", "sh", "-c", "exit $RANK"), 1, ""),
        (("--", "sh", "-c", "kill -KILL $$"), 137, ""),
        (("--timeout", "0.2", "--", "sleep", "60"), 124, "rank 1: terminated"),
        ((), 2, "no program given"),
        (("--json", "x.json", "--clean"), 2, "--json needs ranks"),
        (("--rate", "fast", "--", "true"), 2, "rate='fast'"),
        (("--fault", "nic_down:node=7,rail=0,at_s=1", "--", "true"), 2, "node 7 does not exist"),
        ((*LATE, "--", "true"), 65, "did not fire: nic_down:node=1,rail=0,at_s=600"),
        ((*LATE, "--", "sh", "-c", "exit $RANK"), 1, "did not fire: nic_down"),
    ],
)
def test_command_line_status(
    arguments: tuple[str, ...], status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli(*SMALL, *arguments) == status
    assert words in capfd.readouterr().err


def test_command_line_cleans(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli("--clean") == 0
    assert "stale lab" in capfd.readouterr().out
