"""Boots the virtual machine, runs one command in it, brings back its output and exit status.

The root file system in there is this machine's, writable: files the command writes are here when
it ends, and it may do with them what its user may do here. Must not know what devices a lab makes.
Invariant: no process of the machine outlives `run`, nor, by any signal, the process that called it.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.testing.rdmalab.packages import find_kernel, unavailable_reason, virtme
from r2ccl.testing.rdmalab.shape import REPORT, MachineShape, RdmaLabError

#: Where this copy of r2ccl is imported from.
_IMPORTS = Path(__file__).parents[3]

_READ_NBYTES = 1 << 16
_KILL_TIMEOUT_S = 10.0
_MEMORY = re.compile(r"[1-9][0-9]*[MG]")

#: What the machine has of its own instead of this one's (virtme-ng's init).
_NOT_SHARED = ("/dev", "/proc", "/run", "/sys", "/var/cache", "/var/log", "/var/tmp")

#: $1 is the private directory. Killing group 0 is killing the group this shell is in, which is the
#: machine's and cannot be anybody else's. The reader holds no end of the output: else it would not
#: end. It wakes when the owner closes its pipe or dies.
_GUARDED = """
exec 3<&0 </dev/null
directory=$1; shift
{ read -r _ <&3; rm -rf -- "$directory"; kill -KILL 0; } >/dev/null 2>&1 &
exec "$@" 3<&-
"""

#: A panic, or a boot that does not come this far, leaves no file.
_BOOTED, _READY, _STATUS = "booted", "ready", "status"


class VirtualMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The virtual machine's size.

    Parameters
    ----------
    cpus : int
    memory : str
        In QEMU's spelling: ``4G``, ``512M``.
    is_kvm : bool
        Let the processor run it instead of emulating one. Faster, where it works: a hypervisor
        that does not nest may show ``/dev/kvm`` and hang.

    Raises
    ------
    InvalidArgument
        Out of range or misspelt; says what is allowed.
    """

    cpus: int = 2
    memory: str = "4G"
    is_kvm: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.cpus <= 255:
            raise InvalidArgument(f"rdmalab: cpus={self.cpus}: allowed is 1 to 255")
        if not _MEMORY.fullmatch(self.memory):
            raise InvalidArgument(f"rdmalab: memory={self.memory!r}: write 4G or 512M")


class VmResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended.

    ``status`` is the command's exit status as a shell gives it, and 124 where ``is_timed_out`` says
    that the deadline ended the machine. In seconds: ``boot_s`` is how long the command had to wait
    from the kernel's start on, by the machine's own clock, ``total_s`` how long everything took.
    """

    status: int
    is_timed_out: bool
    boot_s: float
    total_s: float


def run(
    command: Sequence[str],
    *,
    shape: MachineShape,
    machine: VirtualMachine | None = None,
    timeout_s: float = 900.0,
    report: Path | None = None,
    environment: Mapping[str, str] | None = None,
    sink: Callable[[bytes], None] | None = None,
) -> VmResult:
    """Boot, make the lab's devices, run a command, power off.

    Parameters
    ----------
    command : sequence of str
        Runs as root in the current directory, with this process's environment and the lab's
        variables; without limit of locked memory.
    shape : MachineShape
        The devices made before it starts.
    machine : VirtualMachine, optional
    timeout_s : float
        For everything, the boot included.
    report : Path, optional
        A directory for the command's results, made if need be; it is named to the command in
        ``R2CC_RDMALAB_REPORT``. Any other file that it writes is kept as well.
    environment : mapping, optional
        Wins over this process's.
    sink : callable, optional
        Takes the command's output, stdout and stderr together, in pieces as they come; written to
        stdout unless given.

    Raises
    ------
    RdmaLabError
        Something needed is missing, the machine did not boot or did not hold, the devices could not
        be made, or a directory is one that the machine does not share.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise RdmaLabError(reason)
    machine = machine or VirtualMachine()
    if machine.is_kvm and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise RdmaLabError("KVM was asked for, and /dev/kvm cannot be opened; go without it")
    for path in (Path.cwd(), Path(tempfile.gettempdir()), *([report] if report else [])):
        _check_shared(path)
    values = {**os.environ, **shape.environment(), **(environment or {})}
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        values[REPORT] = str(report.resolve())
    with tempfile.TemporaryDirectory(prefix="r2ccl-rdmalab-", ignore_cleanup_errors=True) as name:
        private = Path(name)
        script = private / "run.sh"
        script.write_text(guest_script(command, shape, values, private), encoding="utf-8")
        began = time.monotonic()
        with _started(private, _virtme_command(script, machine)) as process:
            is_timed_out = not _pass_on(process, began + timeout_s, sink or _print)
            return _result(private, is_timed_out, timeout_s, time.monotonic() - began)


def guest_script(
    command: Sequence[str], shape: MachineShape, environment: Mapping[str, str], private: Path
) -> str:
    """Return the shell script that the machine runs as soon as it is up.

    It leaves word in `private` how far it has come; the command's exit status comes last.
    """
    guest = [sys.executable, "-m", "r2ccl.testing.rdmalab.guest"]
    guest += ["--nodes", str(shape.nodes), "--nics", str(shape.nics)]
    # To a virtio port Python would write in blocks.
    merged = {"PYTHONUNBUFFERED": "1", **environment}
    variables = [f"{name}={value}" for name, value in merged.items()]
    lines = [
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        f"directory={shlex.quote(str(private))}",
        f"cut -d ' ' -f 1 /proc/uptime > \"$directory/{_BOOTED}\"",
        "ulimit -l unlimited",
        f"PYTHONPATH={shlex.quote(str(_IMPORTS))} {shlex.join(guest)} || exit 1",
        f"cut -d ' ' -f 1 /proc/uptime > \"$directory/{_READY}\"",
        # Not exported: a shell does not take every name, nor let every variable be set.
        shlex.join(["env", *variables, *command]),
        f'echo $? > "$directory/{_STATUS}"',
    ]
    return "\n".join(lines) + "\n"


def _check_shared(path: Path) -> None:
    for hidden in _NOT_SHARED:
        if path.resolve().is_relative_to(hidden):
            raise RdmaLabError(
                f"{path} is not seen in the virtual machine, which has a {hidden} of its own; "
                "work in another directory, or set TMPDIR to one"
            )


def _pass_on(
    process: subprocess.Popen[bytes], deadline: float, sink: Callable[[bytes], None]
) -> bool:
    """Hand on the output until the machine is off; False where the deadline came first."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            data = os.read(process.stdout.fileno(), _READ_NBYTES)
            if not data:
                return True
            sink(data)
    return False


@contextlib.contextmanager
def _started(private: Path, argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the machine; on leaving kill all of it and remove `private`."""
    process = subprocess.Popen(
        ["sh", "-c", _GUARDED, "rdmalab-guard", str(private), *argv],
        # Temporary files of virtme and QEMU go with the directory.
        env={**os.environ, "TMPDIR": str(private)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A group of its own for the guard to kill, and Ctrl-C is for this process.
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody has killed the guard
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILL_TIMEOUT_S)
        finally:
            process.stdout.close()


def _virtme_command(script: Path, machine: VirtualMachine) -> list[str]:
    kernel, runner = find_kernel(), virtme()
    assert kernel is not None
    assert runner is not None
    argv = [*runner, "--script-sh", f"sh {shlex.quote(str(script))}", "--rw"]
    argv += ["--kimg", str(kernel), "--mods", "auto"]
    argv += ["--cpus", str(machine.cpus), "--memory", machine.memory]
    return argv if machine.is_kvm else [*argv, "--disable-kvm"]


def _result(private: Path, is_timed_out: bool, timeout_s: float, total_s: float) -> VmResult:
    booted, ready, status = (_number(private / name) for name in (_BOOTED, _READY, _STATUS))
    if ready is None:
        why = f"{timeout_s:.0f} s were up" if is_timed_out else "it ended"
        if booted is None:
            raise RdmaLabError(
                f"the virtual machine did not boot: {why} before it ran anything; what it said is "
                "above; try more time, more memory, or no KVM"
            )
        raise RdmaLabError(f"the lab's devices were not made: {why}; the reason is above")
    if status is None and not is_timed_out:
        raise RdmaLabError(
            "the virtual machine ended before the command did: a kernel panic, or no memory left; "
            "try more memory"
        )
    # 124 as timeout(1) gives it.
    return VmResult(
        status=124 if status is None else int(status),
        is_timed_out=status is None,
        boot_s=ready,
        total_s=total_s,
    )


def _number(path: Path) -> float | None:
    """Return what a file of one number holds; None where it is not there or not yet written."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return float(text) if text else None


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


__all__ = ["VirtualMachine", "VmResult", "guest_script", "run"]
