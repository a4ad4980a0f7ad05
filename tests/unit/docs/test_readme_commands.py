"""Every command of the README is run as it stands there.

Stand-ins on PATH replace programs that need other hosts. `make fresh` runs what installs packages;
`ELSEWHERE` names the files that run the rest.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fresh.matrix import ENVIRONMENTS, STEPS
from support.containers import copy_into, image_name, instructions
from support.mpi import find_mpiexec
from support.pages import (
    NEEDS,
    ROOT,
    blocks,
    command_of_the_readme,
    commands_of_the_readme,
    run,
    text_of,
)
from support.slow import slow_but
from support.stand_ins import StandIns

WAIT_S = 100.0
EIGHT = "8 ranks: every element is 36, the last rank is 7"
FOUR = "4 ranks: every element is 10, the last rank is 3"


class Reader(NamedTuple):
    """Runs commands in a folder with the files of the checkout, and with stand-ins on PATH."""

    folder: Path
    stand_ins: StandIns

    def runs(self, words: str, **variables: str) -> str:
        """Run the command of the README that begins with `words`; return what it wrote."""
        return self.runs_line(command_of_the_readme(words), **variables)

    def runs_line(self, line: str, **variables: str) -> str:
        given = {**self.stand_ins.variables, **variables}
        return run(["bash", "-c", line], self.folder, WAIT_S, variables=given)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    folder, others = tmp_path / "checkout", tmp_path / "stand-ins"
    for each in (folder, others):
        each.mkdir()
    for each in ROOT.iterdir():
        if not each.name.startswith(".") and each.name != "out":
            (folder / each.name).symlink_to(each)
    stand_ins = StandIns(others)
    yield Reader(folder, stand_ins)
    stand_ins.close()


def needs(name: str) -> None:
    if not NEEDS[name]():
        pytest.skip(f"{name} is needed")


def makes_a_secret(reader: Reader) -> None:
    needs("openssl")
    reader.runs("(umask 077;")
    file = reader.folder / "FILE"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    reader.stand_ins.add_hosts("a")
    rank = "python -c 'import r2ccl; print(r2ccl.init().nranks)'"
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "R2CC_PORT": "29533"}
    both = f"RANK=1 {rank} & RANK=0 {rank} && wait $!"
    assert reader.runs_line(both, **given, R2CC_SECRET_FILE=str(file)) == "2\n2\n"


def sums_by_ssh(reader: Reader) -> None:
    reader.stand_ins.ssh()
    reader.stand_ins.add_hosts("a", "b")
    assert reader.runs("r2ccl launch --hosts").strip() == EIGHT
    assert sorted(reader.stand_ins.logins.read_text().split()) == ["a", "b"]


def sums_by_slurm(reader: Reader) -> None:
    needs("openssl")
    reader.stand_ins.slurm(nnodes=2)
    said = reader.runs("sbatch")
    job = said.removeprefix("Submitted batch job ").strip()
    status = reader.stand_ins.wait(job, WAIT_S)
    written = (reader.folder / f"slurm-{job}.out").read_text()
    assert (status, written.strip()) == (0, EIGHT)
    assert not list(reader.stand_ins.folder.glob(".r2ccl-secret*"))


def sums_by_kubernetes(reader: Reader) -> None:
    pytest.importorskip("yaml", reason="pyyaml is not installed: pip install --group test")
    needs("openssl")
    root = reader.stand_ins.folder / "image"
    copy_into(root)
    [workdir] = instructions("WORKDIR")
    reader.stand_ins.kubernetes({image_name(): root / workdir.lstrip("/")})
    manifest = text_of("deploy/kubernetes-job.yaml")
    [makes_secret] = re.findall(r"^# +(openssl .*)$", manifest, re.MULTILINE)
    assert reader.runs_line(makes_secret) == "secret/r2ccl created\n"
    assert reader.runs("kubectl").split() == [
        "service/r2ccl-ranks", "created", "job.batch/r2ccl", "created",
    ]  # fmt: skip
    lines = re.findall(
        r"^kubectl (?:wait|logs) .*$", text_of("docs/howto/kubernetes.md"), re.MULTILINE
    )
    assert FOUR in reader.runs_line("\n".join(["set -e", *lines]))


def sums_in_a_lab(reader: Reader) -> None:
    needs("netlab")
    written = reader.runs("r2ccl netlab")
    assert FOUR in written
    assert "rail 2 to rank 1: " in written


def sums_over_mpi(reader: Reader) -> None:
    pytest.importorskip("mpi4py")
    find_mpiexec()
    assert "4 ranks of MPI: the same sum" in reader.runs("mpiexec")


def runs_the_first_snippet(reader: Reader) -> None:
    (reader.folder / "sum.py").write_text(blocks(text_of("README.md"), "python")[0])
    written = reader.runs("r2ccl launch -n 4 -- python sum.py", PYTHONWARNINGS="error")
    for rank in range(4):
        assert f"rank {rank} of 4: every element is 10.0" in written


def runs_the_second_snippet(reader: Reader) -> None:
    readme = text_of("README.md")
    (reader.folder / "lose_a_rail.py").write_text(blocks(readme, "python")[1])
    written = reader.runs("python lose_a_rail.py", PYTHONWARNINGS="error").splitlines()
    assert written[0] == "every element is 1 + 2 + 3: True"
    assert sorted(written) == sorted(blocks(readme, "")[0].splitlines())


def lists_the_targets(reader: Reader) -> None:
    listed = [line.split()[0] for line in reader.runs("make help").splitlines()]
    [phony] = re.findall(r"^\.PHONY: (.*)$", text_of("Makefile"), re.MULTILINE)
    assert sorted(listed) == sorted(phony.split())


def names_packages_of_debian(reader: Reader) -> None:
    known = subprocess.run(
        ["sh", "-c", "apt-cache show python3-venv"],
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    if known.returncode or not known.stdout:
        pytest.skip("apt-get has no list of packages here")
    real = shutil.which("apt-get")
    reader.stand_ins.add("apt-get", f'#!/bin/sh\nexec {real} --simulate "$@"\n')
    assert " newly installed" in reader.runs("apt-get", LC_ALL="C")


def writes(words: str, pattern: str) -> Callable[[Reader], None]:
    """Return a check that the command of the README writes lines of a pattern."""
    return lambda reader: _assert_matches(pattern, reader.runs(words))


def _assert_matches(pattern: str, written: str) -> None:
    assert re.fullmatch(pattern, written, re.DOTALL), written


#: First words of each command, with what runs and checks it.
HERE: dict[str, Callable[[Reader], None]] = {
    "(umask 077;": makes_a_secret,
    "apt-get": names_packages_of_debian,
    "kubectl": sums_by_kubernetes,
    "make help": lists_the_targets,
    "mpiexec": sums_over_mpi,
    "python lose_a_rail.py": runs_the_second_snippet,
    "r2ccl bench": writes("r2ccl bench", r".* algbw +busbw .*# Out of bounds values : 0 OK\n.*"),
    "r2ccl demo": writes("r2ccl demo", r".*\nOK: rail 1 of rank 0 was cut in mid-call[^\n]*\n"),
    "r2ccl doctor": writes("r2ccl doctor", r"rails\n.*\nr2ccl will use [^\n]*\n"),
    "r2ccl explain": writes("r2ccl explain", r"allreduce of .*\nruns \w+: predicted [^\n]*\n.*"),
    "r2ccl launch --hosts": sums_by_ssh,
    "r2ccl launch -n 4 -- python sum.py": runs_the_first_snippet,
    "r2ccl launch -n 4 examples/01_allreduce.py": writes(
        "r2ccl launch -n 4 examples/01_allreduce.py", f"{FOUR}\n"
    ),
    "r2ccl netlab": sums_in_a_lab,
    "sbatch": sums_by_slurm,
}
#: Commands that `make test` runs: not those that start many processes. Other tests run smaller
#: jobs of the demo, on hosts, and with the variables of Slurm.
QUICK = HERE.keys() - {"kubectl", "r2ccl demo", "r2ccl launch --hosts", "sbatch"}
#: First words of each command that no test of this folder runs, with the file that does.
ELSEWHERE = {
    "make fresh": ".ci/run",
    "torchrun": "tests/pytorch/test_programs.py",
}


@pytest.mark.parametrize("words", slow_but(QUICK, HERE))
def test_a_command_does_what_the_readme_says(words: str, reader: Reader) -> None:
    HERE[words](reader)


def test_every_command_of_the_readme_is_run() -> None:
    in_fresh = {step.words for step in STEPS}
    for command in commands_of_the_readme():
        known = [*HERE, *ELSEWHERE, *in_fresh]
        assert any(f"{command} ".startswith(f"{words} ") for words in known), command
    for words, file in ELSEWHERE.items():
        assert words in text_of(file)


@pytest.mark.parametrize("words", [*HERE, *ELSEWHERE])
def test_the_readme_has_each_command_once(words: str) -> None:
    assert command_of_the_readme(words)


def test_the_readme_counts_the_minimal_environments() -> None:
    assert f"{len(ENVIRONMENTS)} kinds of minimal environments" in text_of("README.md")
