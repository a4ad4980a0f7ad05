"""Virtual machine of a lab: `run` boots it, runs one command in it, and powers it off.

The virtual machine uses the root file system of the host, with the permissions of the host user.
Files that the command writes stay on the host, except those in `_NOT_SHARED`. All processes of the
virtual machine end with `run`, even if the process that called `run` is killed.
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
from r2ccl.testing.faults import is_integer, is_text
from r2ccl.testing.rdmalab.packages import find_kernel, unavailable_reason, virtme
from r2ccl.testing.rdmalab.shape import REPORT, MachineShape, RdmaLabError

#: Directory from which this copy of r2ccl is imported.
_IMPORTS = Path(__file__).parents[3]

_READ_NBYTES = 1 << 16
_KILL_TIMEOUT_S = 10.0
_MEMORY = re.compile(r"[1-9][0-9]*[MG]")

#: Directories that the machine does not share with the host (virtme-ng's init mounts its own).
_NOT_SHARED = ("/dev", "/proc", "/run", "/sys", "/var/cache", "/var/log", "/var/tmp")

#: Shell script that starts the machine; $1 is the private directory, the rest is the command. A
#: background reader of stdin wakes when the owner closes the pipe or dies, and kills process group
#: 0: its own group, which contains only the machine. The reader's output goes to /dev/null because
#: holding the output pipe open would keep the owner from seeing its end.
_GUARDED = """
exec 3<&0 </dev/null
directory=$1; shift
{ read -r _ <&3; rm -rf -- "$directory"; kill -KILL 0; } >/dev/null 2>&1 &
exec "$@" 3<&-
"""

#: Files that the machine writes when it reaches these stages; after a failure the later ones are
#: missing.
_BOOTED, _READY, _STATUS = "booted", "ready", "status"


class VirtualMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the virtual machine (CPUs and memory), and its use of KVM.

    Parameters
    ----------
    cpus : int
        Number of CPUs, 1 to 255.
    memory : str
        Size of the memory in QEMU's syntax: ``4G``, ``512M``.
    is_kvm : bool
        Use KVM instead of an emulated CPU. KVM is faster, but the machine may hang under a
        hypervisor that offers ``/dev/kvm`` without nested virtualization.

    Raises
    ------
    InvalidArgument
        If a value is out of range or malformed. The message says what is allowed.
    """

    cpus: int = 2
    memory: str = "4G"
    is_kvm: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.cpus, 1, 255):
            raise InvalidArgument(f"a machine cannot have cpus={self.cpus!r}; allowed is 1 to 255")
        if not is_text(self.memory, _MEMORY):
            raise InvalidArgument(
                f"a machine cannot have memory={self.memory!r}; write it like 4G or 512M"
            )


class VmResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `run`.

    Attributes
    ----------
    status : int
        Exit status of the command as a shell reports it; 124 if `is_timed_out`.
    is_timed_out : bool
        True if the machine was killed at the time limit, before the command ended.
    boot_s : float
        Seconds from the kernel's start until the command started, by the machine's clock.
    total_s : float
        Seconds of the whole run, by the host's clock.
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
    """Boot the machine, make the lab's devices, run a command, and power off.

    Parameters
    ----------
    command : sequence of str
        Program and arguments. The command runs as root in the current directory, with the
        environment of this process, the lab's variables and unlimited locked memory.
    shape : MachineShape
        The devices to make before the command starts.
    machine : VirtualMachine, optional
        Size of the machine. Default: ``VirtualMachine()``.
    timeout_s : float
        Time limit in seconds for the whole run, including the boot. If the limit passes while the
        command runs, the machine is killed and `VmResult.is_timed_out` is True.
    report : Path, optional
        Directory for the command's results, created if it does not exist. The command finds the
        path of the directory in its variable ``R2CC_RDMALAB_REPORT``. Files that the command writes
        to other directories are kept too if the machine shares these directories with the host.
    environment : mapping, optional
        Variables that override the variables of this process and of the lab. If `report` is given,
        they do not override ``R2CC_RDMALAB_REPORT``.
    sink : callable, optional
        Called with each piece of the machine's output: stdout and stderr of the command, in one
        stream with messages of the runner and of the setup. Default: the output goes to stdout.

    Raises
    ------
    InvalidArgument
        If `report` cannot be made.
    RdmaLabError
        If a requirement is missing, KVM is requested and cannot be used, the machine does not share
        a directory that the run needs, the machine does not boot, the devices cannot be made, the
        time limit passes before the command starts, or the machine ends while the command runs.
    """
    reason = unavailable_reason()
    if reason is not None:
        raise RdmaLabError(reason)
    machine = machine or VirtualMachine()
    if machine.is_kvm and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        raise RdmaLabError("KVM was requested, but /dev/kvm cannot be opened: run without KVM")
    for path in (Path.cwd(), Path(tempfile.gettempdir()), *([report] if report else [])):
        _check_shared(path)
    values = {**os.environ, **shape.environment(), **(environment or {})}
    if report is not None:
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidArgument(
                f"cannot make the directory {report} for results ({exc.strerror}): give another "
                "path, in a directory where this user can write"
            ) from exc
        values[REPORT] = str(report.resolve())
    with tempfile.TemporaryDirectory(prefix="r2ccl-rdmalab-", ignore_cleanup_errors=True) as name:
        private = Path(name)
        script = private / "run.sh"
        text = guest_script(command, shape, values, private)
        script.write_bytes(os.fsencode(text))  # restores bytes that are not UTF-8
        began = time.monotonic()
        with _started(private, _virtme_command(script, machine)) as process:
            is_timed_out = not _pass_on(process, began + timeout_s, sink or _print)
            return _result(private, is_timed_out, timeout_s, time.monotonic() - began)


def guest_script(
    command: Sequence[str], shape: MachineShape, environment: Mapping[str, str], private: Path
) -> str:
    """Return the shell script that the machine runs after boot.

    The script writes a file into `private` after each stage; the last file contains the command's
    exit status.
    """
    guest = [sys.executable, "-m", "r2ccl.testing.rdmalab.guest"]
    guest += ["--nodes", str(shape.nodes), "--nics", str(shape.nics)]
    # Without PYTHONUNBUFFERED, Python buffers its output to a virtio port in blocks.
    merged = {"PYTHONUNBUFFERED": "1", **environment}
    variables = [f"{name}={value}" for name, value in merged.items()]
    lines = [
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        f"directory={shlex.quote(str(private))}",
        f"cut -d ' ' -f 1 /proc/uptime > \"$directory/{_BOOTED}\"",
        "ulimit -l unlimited",
        f"PYTHONPATH={shlex.quote(str(_IMPORTS))} {shlex.join(guest)} || exit 1",
        f"cut -d ' ' -f 1 /proc/uptime > \"$directory/{_READY}\"",
        # Use env instead of export: a shell rejects some names and makes some variables read-only.
        shlex.join(["env", *variables, *command]),
        f'echo $? > "$directory/{_STATUS}"',
    ]
    return "\n".join(lines) + "\n"


def _check_shared(path: Path) -> None:
    for hidden in _NOT_SHARED:
        if path.resolve().is_relative_to(hidden):
            raise RdmaLabError(
                f"{path} is not shared with the virtual machine, which has its own {hidden}; "
                "choose another working directory, TMPDIR or report directory"
            )


def _pass_on(
    process: subprocess.Popen[bytes], deadline: float, sink: Callable[[bytes], None]
) -> bool:
    """Pass output to `sink` until the machine is off; return False if `deadline` passes first."""
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
    """Start the machine; on exit kill all its processes and remove `private`."""
    process = subprocess.Popen(
        ["sh", "-c", _GUARDED, "rdmalab-guard", str(private), *argv],
        # Temporary files of virtme and QEMU are removed together with the directory.
        env={**os.environ, "TMPDIR": str(private)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # The session gives the guard a process group to kill, and keeps Ctrl-C from the machine.
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
        except subprocess.TimeoutExpired:  # the guard was killed
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
        why = f"the time limit of {timeout_s:.0f} s passed" if is_timed_out else "it exited"
        if booted is None:
            raise RdmaLabError(
                f"the virtual machine did not boot: {why} before the boot was complete; see its "
                "output above; try more time, more memory, or no KVM"
            )
        raise RdmaLabError(
            f"the virtual machine did not create the lab's devices: {why} before they were ready; "
            "see its output above"
        )
    if status is None and not is_timed_out:
        raise RdmaLabError(
            "the virtual machine ended before its command had finished, perhaps because of a "
            "kernel panic or too little memory: see the output above, or try more memory"
        )
    # timeout(1) uses status 124 as well.
    return VmResult(
        status=124 if status is None else int(status),
        is_timed_out=status is None,
        boot_s=ready,
        total_s=total_s,
    )


def _number(path: Path) -> float | None:
    """Return the number in a file; None if the file is missing or empty."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return float(text) if text else None


def _print(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


__all__ = ["VirtualMachine", "VmResult", "guest_script", "run"]
