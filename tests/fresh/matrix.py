"""Tries the commands of the README as strangers would, on bare machines made from this one.

Every environment is a mount namespace (and a network or user namespace where that is its point)
with a user, a home and a /tmp of its own; the commands are read from the README and run there, on
clones of this checkout. What fails, shows a traceback, is silent for long or leaves something
behind is named. As an ordinary user only the environments that need no root are tried.

Run by the system's Python, before anything is installed: the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.pages import ROOT, command_of_the_readme

LOGS = ROOT / "out" / "fresh"

#: Of Debian's /etc/profile for users; without the administrator's folders.
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Numbers that no account of this machine has.
USERS = {"root": 0, "alice": 54321, "bob": 54322}

#: About a hundred tests: processes, sockets, shared folders, caches on disk, namespaces.
TESTS = (
    "tests/unit/bootstrap/test_launch.py tests/unit/docs/test_examples.py "
    "tests/unit/kernels/test_half.py tests/contract/test_bootstrap_processes.py "
    "tests/netlab/test_netlab_run.py"
)

#: capabilities(7) that containers are given as a rule; CAP_NET_ADMIN and CAP_SYS_ADMIN are not
#: among them.
CONTAINER_CAPABILITIES = (
    *("chown", "dac_override", "fsetid", "fowner", "mknod", "net_raw", "setgid", "setuid"),
    *("setfcap", "setpcap", "net_bind_service", "sys_chroot", "kill", "audit_write"),
)

#: A command that takes longer is ended and counts as failed; the longest silence allowed.
TIMEOUT_S = 3600.0
SILENCE_S = 60.0
#: Guards of namespaces end a moment after their owner.
SETTLE_S = 5.0

#: Lines shown of the output of a command that failed.
NSHOWN = 60

_EXIT_UNAVAILABLE = 69

#: Variables of the caller that say where packages come from and whom to trust.
_PASSED_PREFIXES = (
    *("PIP_", "TORCH_INDEX", "SSL_CERT", "REQUESTS_CA"),
    *("http_proxy", "https_proxy", "no_proxy"),
)

#: Waits for a line: until then users are mapped.
_WAIT = 'read -r _ && exec "$@" </dev/null'

_HIDE_IPROUTE2 = """
for folder in /bin /sbin /usr/bin /usr/sbin; do
    for tool in ip tc bridge; do
        [ ! -e "$folder/$tool" ] || mount --bind /dev/null "$folder/$tool"
    done
done
"""
_LOOPBACK_UP = "ip link set lo up\n"
_NO_IPV6 = (
    "for each in all default lo; do echo 1 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done\n"
)
_NO_USER_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces\n"


class Environment(NamedTuple):
    """A kind of machine, and a user on it.

    ``unshare`` and ``setup`` (shell, run by root in the new namespaces) make it; ``variables`` go
    to the user, SCRATCH in them stands for the environment's own folder. ``checkout`` names the
    clone: one that another environment has installed into, or its own, which is then installed in
    this environment.
    """

    name: str
    says: str
    user: str = "alice"
    checkout: str = "alice"
    unshare: tuple[str, ...] = ()
    setup: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    capabilities: tuple[str, ...] | None = None
    prefix: tuple[str, ...] = ()
    needs_root: bool = True


ENVIRONMENTS = (
    Environment(
        "user", "ordinary user, Debian's PATH, empty home", needs_root=False, checkout="alice"
    ),
    Environment("root", "root", user="root", checkout="root"),
    Environment(
        "no-userns",
        "user namespaces off",
        unshare=("--user",),
        setup=_NO_USER_NAMESPACES,
    ),
    Environment("no-iproute2", "no ip, tc, bridge", setup=_HIDE_IPROUTE2),
    Environment(
        "container",
        "root of a plain container: no CAP_NET_ADMIN, no user namespaces",
        user="root",
        checkout="root",
        unshare=("--user",),
        setup=_NO_USER_NAMESPACES,
        capabilities=CONTAINER_CAPABILITIES,
    ),
    Environment(
        "home-readonly", "home cannot be written", setup='chown 0 "$HOME"; chmod 555 "$HOME"'
    ),
    Environment(
        "home-absent",
        "no home at all, from the installation on",
        checkout="absent",
        variables=(("HOME", "/nonexistent"),),
        needs_root=False,
    ),
    Environment(
        "small-shm",
        "/dev/shm of 1 MiB",
        setup="mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm",
    ),
    Environment(
        "other-tmp",
        "TMPDIR on another file system",
        setup='mkdir -p "$SCRATCH/other" && mount -t tmpfs -o mode=1777 tmpfs "$SCRATCH/other"',
        variables=(("TMPDIR", "SCRATCH/other"),),
    ),
    Environment("one-cpu", "one CPU", prefix=("taskset", "-c", "0"), needs_root=False),
    Environment(
        "c-locale",
        "LANG=C, LC_ALL=C, TERM=dumb",
        variables=(("LANG", "C"), ("LC_ALL", "C"), ("TERM", "dumb")),
        needs_root=False,
    ),
    Environment("no-ipv6", "IPv6 off", unshare=("--net",), setup=_LOOPBACK_UP + _NO_IPV6),
    Environment("offline", "no network but loopback", unshare=("--net",), setup=_LOOPBACK_UP),
    Environment("spaces", "a path with spaces", checkout="a path with spaces", needs_root=False),
    Environment(
        "second-user", "a second user at the same time as the first", user="bob", checkout="bob"
    ),
)


class Step(NamedTuple):
    """A script of the shell, and the exit statuses that are right for it.

    ``words`` are the first words of the README's command in it. ``environments`` names those in
    which it is run; all if it is empty. A long step is only run with ``--long``.
    """

    name: str
    script: str
    words: str = ""
    allowed: tuple[int, ...] = (0,)
    environments: tuple[str, ...] = ()
    is_long: bool = False
    timeout_s: float = TIMEOUT_S


def _step(
    name: str,
    words: str,
    *,
    more: str = "",
    before: str = "",
    allowed: tuple[int, ...] = (0,),
    environments: tuple[str, ...] = (),
) -> Step:
    """Return the step that runs the README's command that begins with `words`, as it stands there.

    `before` is run before it in the same shell. With further arguments in `more`, `words` must be
    all of the command.
    """
    command = command_of_the_readme(words)
    script = f"set -e\n{before}\n{f'{words} {more}' if more else command}\n"
    return Step(name, script, words, allowed, environments)


def _long(name: str, words: str, timeout_s: float = TIMEOUT_S) -> Step:
    step = _step(name, words, environments=("user",))
    return step._replace(is_long=True, timeout_s=timeout_s)


#: Makes and enters a virtual environment without r2ccl.
_EMPTY_VENV = "python3 -m venv .venv/empty\n. .venv/empty/bin/activate"

STEPS = (
    _step("demo", "make demo"),
    _step("test", "make test", more=f'TESTS="{TESTS}"'),
    _step("netlab", "r2ccl netlab", allowed=(0, _EXIT_UNAVAILABLE)),
    _step("launch", "r2ccl launch -n 4 examples/01_allreduce.py"),
    _step("cut", "r2ccl demo"),
    _step("doctor", "r2ccl doctor"),
    _step("pip", "pip install", before=_EMPTY_VENV, environments=("user",)),
    _long("docs", "make docs"),
    _long("bench", "make bench"),
    _long("demo-gpt", "make demo-gpt"),
    _long("test-all", "make test-all", 4 * TIMEOUT_S),
)


class Outcome(NamedTuple):
    """How a command ended in an environment; `wrong` is empty where all is well."""

    environment: str
    step: str
    status: int
    took_s: float
    silence_s: float
    last_line: str
    wrong: str


class Matrix:
    """Runs steps in environments; everything it makes is in `scratch` or in namespaces.

    Parameters
    ----------
    scratch : Path
        Own folder, which all users may enter.
    steps : sequence of Step
    """

    def __init__(self, scratch: Path, steps: Sequence[Step]) -> None:
        self._scratch = scratch
        self._steps = steps
        self._is_root = os.geteuid() == 0
        self._token = secrets.token_hex(8)
        passwd = Path("/etc/passwd").read_text()
        passwd += "".join(
            f"{name}:x:{uid}:{uid}::/nonexistent:/bin/sh\n" for name, uid in USERS.items() if uid
        )
        (scratch / "passwd").write_text(passwd)

    def run(self, environment: Environment) -> list[Outcome]:
        """Run all steps in an environment, and look at what is left."""
        if environment.needs_root and not self._is_root:
            return []
        checkout = self._checkout(environment)
        home = self._folder(environment, "home")
        temporary = self._folder(environment, "tmp")
        outcomes = [
            self._attempt(environment, step, checkout)
            for step in self._steps
            if not step.environments or environment.name in step.environments
        ]
        left = self._left_behind(environment, home, temporary)
        return [*outcomes, Outcome(environment.name, "left", 0, 0.0, 0.0, "", left)]

    def _checkout(self, environment: Environment) -> Path:
        """Return the environment's clone, made, and installed by another environment if shared."""
        checkout = self._scratch / "checkouts" / environment.checkout / "r2ccl"
        if not checkout.exists():
            checkout.parent.mkdir(parents=True)
            subprocess.run(
                ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)], check=True
            )
            if self._is_root:
                owner = str(USERS[environment.user])
                subprocess.run(
                    ["chown", "-R", f"{owner}:{owner}", str(checkout.parent)], check=True
                )
        installer = next(each for each in ENVIRONMENTS if each.checkout == environment.checkout)
        if installer.name != environment.name and not (checkout / ".venv" / ".test").exists():
            outcome = self._attempt(installer, Step("install", "make .venv/.test"), checkout)
            if outcome.wrong:
                raise SystemExit(f"cannot install for {environment.name}: {outcome}")
        return checkout

    def _folder(self, environment: Environment, name: str) -> Path:
        folder = self._scratch / environment.name / name
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o1777 if name == "tmp" else 0o755)
            if self._is_root:
                os.chown(folder, USERS[environment.user], USERS[environment.user])
        return folder

    def _attempt(self, environment: Environment, step: Step, checkout: Path) -> Outcome:
        log = _log(environment.name, step.name)
        began_s = time.monotonic()
        status, silence_s = self._execute(environment, step, checkout, log)
        took_s = time.monotonic() - began_s
        text = log.read_text(errors="replace")
        wrong = []
        if status not in step.allowed:
            wrong.append(f"exit status {status}")
        if "Traceback (most recent call last)" in text:
            wrong.append("a traceback")
        if step.name == "demo" and silence_s > SILENCE_S:
            wrong.append(f"silent for {silence_s:.0f} s")
        last = _last_lines(text, 1) or "(no output)"
        return Outcome(
            environment.name, step.name, status, took_s, silence_s, last, ", ".join(wrong)
        )

    def _execute(
        self, environment: Environment, step: Step, checkout: Path, log: Path
    ) -> tuple[int, float]:
        """Run a step with its output in `log`; return its status and its longest silence."""
        is_mapped = "--user" in environment.unshare
        popen = subprocess.Popen(
            self._command(environment, step.script),
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert popen.stdin is not None
        if is_mapped:
            _map_all_ids(popen)
        popen.stdin.write(b"go\n")
        popen.stdin.close()
        silence_s = _copy(popen, log, step.timeout_s)
        return popen.wait(), silence_s

    def _command(self, environment: Environment, script: str) -> list[str]:
        variables = [f"{name}={value}" for name, value in self._variables(environment).items()]
        command = ["env", "-i", *variables, *environment.prefix, "sh", "-c", script]
        if not self._is_root:
            return ["sh", "-c", _WAIT, "sh", *command]
        uid = str(USERS[environment.user])
        drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        if environment.capabilities is not None:
            kept = ",".join(f"+{name}" for name in environment.capabilities)
            drop += ["--inh-caps=-all", f"--bounding-set=-all,{kept}"]
        scratch = self._scratch / environment.name
        enter = (
            "set -e\n"
            f"export SCRATCH='{scratch}' HOME='{scratch}/home'\n"
            'mount --bind "$SCRATCH/tmp" /tmp\n'
            f"mount --bind '{self._scratch}/passwd' /etc/passwd\n"
            f"{environment.setup}\n"
            'exec "$@"\n'
        )
        return [
            *("unshare", "--mount", *environment.unshare, "--", "sh", "-c", _WAIT, "sh"),
            # A second shell, for in a user namespace only an exec after the mapping gives the
            # capabilities.
            *("sh", "-c", enter, "sh"),
            *drop,
            *command,
        ]

    def _variables(self, environment: Environment) -> dict[str, str]:
        scratch = self._scratch / environment.name
        self._folder(environment, "home")
        self._folder(environment, "tmp")
        passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_PREFIXES)}
        path = ROOT_PATH if environment.user == "root" else USER_PATH
        own = {
            "HOME": f"{scratch}/home",
            "USER": environment.user,
            "LANG": "C.UTF-8",
            "PATH": f".venv/bin:{path}",
            "R2CC_FRESH": self._mark(environment),
            **({} if self._is_root else {"TMPDIR": f"{scratch}/tmp"}),
        }
        asked = {k: v.replace("SCRATCH", str(scratch)) for k, v in environment.variables}
        return {**passed, **own, **asked}

    def _mark(self, environment: Environment) -> str:
        """Return what all processes of an environment have in theirs."""
        return f"{self._token}-{environment.name}"

    def _left_behind(self, environment: Environment, home: Path, temporary: Path) -> str:
        deadline = time.monotonic() + SETTLE_S
        while (
            left := self._left_now(environment, home, temporary)
        ) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left_now(self, environment: Environment, home: Path, temporary: Path) -> str:
        found = [
            f"process {pid}" for pid in _processes_with(f"R2CC_FRESH={self._mark(environment)}")
        ]
        found += [str(path) for path in temporary.iterdir()]
        found += [str(path) for path in home.iterdir() if path.name != ".cache"]
        return ", ".join(found)


def _log(environment: str, step: str) -> Path:
    return LOGS / f"{environment}-{step}.log"


def _last_lines(text: str, n: int) -> str:
    """Return the last `n` lines of `text` that are not blank."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-n:])


def _map_all_ids(popen: subprocess.Popen[bytes]) -> None:
    """Give a process that makes its own user namespace this one's users, once it is there."""
    own = os.readlink("/proc/self/ns/user")
    while os.readlink(f"/proc/{popen.pid}/ns/user") == own:
        time.sleep(0.01)
    for kind in ("uid", "gid"):
        Path(f"/proc/{popen.pid}/{kind}_map").write_text("0 0 4294967295\n")


def _copy(popen: subprocess.Popen[bytes], log: Path, timeout_s: float) -> float:
    """Write what a process prints to `log` until it ends, or end it; return its longest silence."""
    assert popen.stdout is not None
    began_s = last_s = time.monotonic()
    silence_s = 0.0
    with log.open("wb") as out, selectors.DefaultSelector() as selector:
        selector.register(popen.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(1.0)
            now_s = time.monotonic()
            silence_s = max(silence_s, now_s - last_s)
            if ready:
                data = os.read(popen.stdout.fileno(), 1 << 16)
                if not data:
                    return silence_s
                out.write(data)
                last_s = now_s
            elif now_s - began_s > timeout_s:
                out.write(b"\nended by the matrix: the time was up\n")
                os.killpg(popen.pid, signal.SIGKILL)
                return silence_s


def _processes_with(variable: str) -> list[int]:
    """Return the processes whose environment has `variable`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # another user's, or gone
                continue
            if variable.encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def _lack() -> str:
    """Return what an ordinary user of this machine lacks for the README's first command."""
    for program in ("make", "git", "python3"):
        if shutil.which(program, path=USER_PATH) is None:
            return f"{program} is not in {USER_PATH}: apt-get install {program}"
    python = str(shutil.which("python3", path=USER_PATH))
    check = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode:
        return f"{python} is older than 3.11 or has no venv module: apt-get install python3-venv"
    return ""


def show(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    rows = ["| environment | command | status | seconds | longest silence, s | outcome |"]
    rows.append("|---|---|---|---|---|---|")
    for each in outcomes:
        says = f"WRONG: {each.wrong}" if each.wrong else each.last_line[:110].replace("|", "/")
        if each.step == "left" and not each.wrong:
            says = "nothing left behind"
        rows.append(
            f"| {each.environment} | {each.step} | {each.status} | {each.took_s:.0f} "
            f"| {each.silence_s:.0f} | {says} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Parse the command line, run, print the table; 1 if anything was wrong."""
    names = [each.name for each in ENVIRONMENTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--steps", default="", help="comma-separated; default: all")
    parser.add_argument("--whole", action="store_true", help="run all tests, not a hundred")
    parser.add_argument(
        "--long", action="store_true",
        help="run the commands that take long in the environment `user`, too: "
        + ", ".join(each.words for each in STEPS if each.is_long),
    )  # fmt: skip
    args = parser.parse_args()
    unknown = sorted(set(args.environment) - set(names))
    if unknown:
        parser.error(f"no environment {', '.join(unknown)}; there are {', '.join(names)}")
    lack = _lack()
    if lack:
        print(f"fresh: skipped: {lack}")
        return 0
    chosen = [each for each in ENVIRONMENTS if each.name in (args.environment or names)]
    steps = [
        each
        for each in STEPS
        if (each.name in args.steps.split(",") if args.steps else args.long or not each.is_long)
    ]
    if args.whole:
        steps = [_step("test", "make test") if each.name == "test" else each for each in steps]
    LOGS.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="r2ccl-fresh-", dir="/var/tmp"))
    scratch.chmod(0o755)
    outcomes: list[Outcome] = []
    try:
        matrix = Matrix(scratch, steps)
        groups: list[list[Environment]] = [[each] for each in chosen if each.name != "second-user"]
        if any(each.name == "second-user" for each in chosen):
            first, second = (e for e in ENVIRONMENTS if e.name in ("user", "second-user"))
            groups.append([first._replace(name="first-user"), second])
        for group in groups:
            print(f"{' and '.join(each.name for each in group)} ...", flush=True)
            with ThreadPoolExecutor(len(group)) as pool:
                found = [each for part in pool.map(matrix.run, group) for each in part]
            if not found:
                print("  skipped: needs root", flush=True)
            for each in found:
                print(
                    f"  {each.environment} {each.step}: {each.wrong or 'as it should'}", flush=True
                )
            outcomes += found
    finally:
        shutil.rmtree(scratch)
    table = show(outcomes)
    (LOGS / "table.md").write_text(table + "\n")
    print(f"\n{table}\n")
    wrong = [each for each in outcomes if each.wrong]
    for each in wrong:
        log = _log(each.environment, each.step)
        if log.exists():
            print(f"{log} ends with:\n{_last_lines(log.read_text(errors='replace'), NSHOWN)}\n")
    print(f"{len(outcomes) - len(wrong)} passed, {len(wrong)} failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
