"""Stand-ins for programs that run ranks on other hosts: ssh, sbatch and srun, kubectl.

Here the other hosts are loopback addresses of this machine. The stand-ins do what the commands of
README and docs need of the real programs, and refuse every option or field that they do not
implement.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
_HERE = Path(__file__).parent
#: Python imports ``sitecustomize`` from here: it resolves the names of the hosts.
_HOST = _HERE / "host"

#: Logs in as ssh does: the command line goes to a shell with the environment of that host.
_SSH = """#!/bin/sh
while :; do
    case "$1" in
        -[opl]) shift 2 ;;
        -*) echo "ssh: the stand-in does not implement $1" >&2; exit 255 ;;
        *) break ;;
    esac
done
host="$1"; shift
enter=
case "$host" in
{entries}
    127.*) ;;
    *) grep -q " $host\\$" {hosts} || {{
            echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255
        }} ;;
esac
echo "$host" >> {log}
cd "$HOME" || exit 255
exec $enter env -i HOME="$HOME" PATH="$PATH" {variables} sh -c "$*"
"""


def add_host(folder: Path, name: str) -> str:
    """Give a host an address, which is returned.

    Tests that run at the same time can use the same port of different addresses.
    """
    address = f"127.{random.randrange(1, 255)}.{random.randrange(256)}.{random.randrange(2, 255)}"
    with (folder / "hosts").open("a", encoding="utf-8") as hosts:
        hosts.write(f"{address} {name}\n")
    return address


def start_job(
    folder: Path, job: str, argv: list[str], output: Path, env: Mapping[str, str] | None = None
) -> None:
    """Start a job that outlives the command that starts it; `StandIns.wait` waits for its end."""
    report = '"$@"; echo $? > "$0.new"; mv "$0.new" "$0"'
    with output.open("wb") as out:
        process = subprocess.Popen(
            ["sh", "-c", report, str(folder / "ended" / job), *argv],
            env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    (folder / "started" / job).write_text(str(process.pid))


class StandIns:
    """Stand-ins on a PATH of their own, and the jobs that they start.

    Parameters
    ----------
    folder : Path
        Existing folder for their files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs = folder / "programs"
        self._hosts = folder / "hosts"
        for each in ("programs", "started", "ended"):
            (folder / each).mkdir()
        self._hosts.touch()

    @property
    def variables(self) -> dict[str, str]:
        """Variables for the shell whose commands use the stand-ins."""
        found = [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {**self._of_a_host(), "PATH": os.pathsep.join(found), "HOME": str(self.folder)}

    def _of_a_host(self) -> dict[str, str]:
        """Return variables that stand for the installation of r2ccl on a host."""
        modules = [str(_HOST), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(modules), "STAND_IN_HOSTS": str(self._hosts)}

    def add_hosts(self, *names: str) -> None:
        """Give each name an address."""
        for name in names:
            add_host(self.folder, name)

    def ssh(self, enter: Mapping[str, str] | None = None) -> str:
        """Make ``ssh``, which writes the names of its hosts to the file ``logins``.

        A host in `enter` runs the command line behind the command that `enter` gives.
        """
        variables = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in self._of_a_host().items()
        )
        entries = "\n".join(
            f"    {host}) enter={shlex.quote(command)} ;;"
            for host, command in (enter or {}).items()
        )
        files = {"hosts": shlex.quote(str(self._hosts)), "log": shlex.quote(str(self.logins))}
        return self.add("ssh", _SSH.format(variables=variables, entries=entries, **files))

    @property
    def logins(self) -> Path:
        return self.folder / "logins"

    def slurm(self, nnodes: int) -> None:
        """Make ``sbatch`` and ``srun`` for a cluster with the hosts ``node1``, ``node2`` ..."""
        self.add_hosts(*(f"node{number + 1}" for number in range(nnodes)))
        for name in ("sbatch", "srun"):
            self.add(name, self._call("slurm.py", name))

    def kubernetes(self, images: Mapping[str, Path]) -> None:
        """Make ``kubectl`` for a cluster that has nothing but images.

        `images` gives their names and working directories. r2ccl is installed in all of them.
        """
        objects = self.folder / "objects"
        objects.mkdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.defpath])
        env = {**self._of_a_host(), "PATH": path, "HOME": str(self.folder)}
        for name, workdir in images.items():
            image = json.dumps({"folder": str(workdir), "env": env})
            (objects / f"image.{name}").write_text(image, encoding="utf-8")
        self.add("kubectl", self._call("kubectl.py"))

    def _call(self, *command: str) -> str:
        file, *arguments = command
        words = shlex.join([sys.executable, str(_HERE / file), str(self.folder), *arguments])
        return f'#!/bin/sh\nexec {words} "$@"\n'

    def add(self, name: str, text: str) -> str:
        """Make a program of a script's text; return its path."""
        file = self._programs / name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o700)
        return str(file)

    def wait(self, job: str, timeout_s: float) -> int:
        """Wait until a job ends that a stand-in started; return its exit status."""
        until_s = time.monotonic() + timeout_s
        ended = self.folder / "ended" / job
        while not ended.exists():
            assert time.monotonic() < until_s, f"{job} has not ended within {timeout_s:g} s"
            select.select([], [], [], 0.02)
        return int(ended.read_text())

    def close(self) -> None:
        """Kill the jobs that still run."""
        for each in (self.folder / "started").iterdir():
            if not (self.folder / "ended" / each.name).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(each.read_text()), signal.SIGKILL)
