"""Pages of the documentation: their code blocks, and how these are run."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
#: Pages outside ``docs/``.
OTHERS = tuple(
    ROOT / name
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "bench/README.md")
)
PAGES = [README, *DOCS, *OTHERS]
SNIPPET_TIMEOUT_S = 60
#: A busy machine takes long to start ranks, above all those that import torch.
_COMMAND_TIMEOUT_S = 300

_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[\w, ]+) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block.

    With a `title`, the text is that of a file. `needs` names what its commands need beyond an
    installation of r2ccl.
    """

    language: str
    title: str
    needs: frozenset[str]
    text: str


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def all_blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        needs = frozenset(re.split(r",\s*", found["needs"])) if found["needs"] else frozenset()
        yield Block(found["language"], found["title"] or "", needs, found["text"])


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language that are no files; of no language: ``""``."""
    return [each.text for each in all_blocks(text) if (each.language, each.title) == (language, "")]


def commands_of_the_readme() -> list[str]:
    """Return the commands of the README as they stand there, with the comments behind them.

    These are the lines in blocks of ``sh``, and all code of several words in the text that begins
    like a command. Where another command begins with it, as with ``r2ccl launch``, it is left out.
    """
    text = text_of("README.md")
    lines = r"(?:[^\n]*\\\n)*[^\n]+\n"
    found = [line for block in blocks(text, "sh") for line in re.findall(lines, block)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`(\(?[\w-]+ [^`]+)`", prose):
        if not any(each.startswith(f"{code} ") for each in found):
            found.append(code)
    return list(dict.fromkeys(found))


def command_of_the_readme(words: str) -> str:
    """Return the only command of the README that begins with `words`."""
    found = [each for each in commands_of_the_readme() if f"{each} ".startswith(f"{words} ")]
    assert len(found) == 1, f"the README has {len(found)} commands that begin with {words!r}"
    return found[0]


# Running them


def run_script(folder: Path, code: str) -> str:
    """Run a snippet that must succeed without warnings; return what it wrote."""
    script = folder / "snippet.py"
    script.write_text(code, encoding="utf-8")
    return run([sys.executable, "-W", "error", str(script)], folder)


def run(
    argv: list[str],
    folder: Path,
    timeout_s: float = SNIPPET_TIMEOUT_S,
    checkout: Path | None = ROOT,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run a command that must succeed, with this checkout; return its standard output.

    The processes that it started end with it, also after the timeout. Without a `checkout`, it runs
    with the package that is installed. `variables` replace those of this process.
    """
    paths = [str(checkout)] if checkout else []
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env={
            **_without_settings(os.environ),
            "PYTHONPATH": path,
            "PATH": programs,
            **(variables or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        written, complaints = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    assert process.returncode == 0, f"{argv}\n{written}{complaints}"
    return written


def _without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a reader of the page, without the settings of the tests.

    Unbuffered, a line and its end are two writes, between which another process may write. The
    variables of make would tell a ``make`` that it is called by another one.
    """
    left_out = ("R2CC_", "PYTHONUNBUFFERED", "MAKE", "MFLAGS")
    return {name: value for name, value in env.items() if not name.startswith(left_out)}


def follow(page: Path, folder: Path, checkout: Path | None = ROOT) -> list[str]:
    """Do what a page says, in order: write its files, run its commands, compare their output.

    Blocks with a title are files. Blocks of ``sh`` are run; a block of ``text`` behind one is what
    it writes (`assert_shows`). Blocks of other languages are only shown. Without a `checkout`, the
    package that is installed is used.

    Returns
    -------
    list of str
        What the machine lacked for the blocks that were left out.
    """
    left_out: list[str] = []
    written: str | None = None
    for block in all_blocks(page.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            lacking = [each for each in sorted(block.needs) if not NEEDS[each]()]
            left_out += lacking
            argv = ["bash", "-euo", "pipefail", "-c", block.text]
            written = None if lacking else run(argv, folder, _COMMAND_TIMEOUT_S, checkout)
        elif block.language == "text" and written is not None:
            assert_shows(block.text, written)
            written = None
    return left_out


def assert_shows(shown: str, written: str) -> None:
    """Check that a program wrote the lines that a page shows, in any order, as ranks write them.

    ``…`` stands for any text; a line of it alone, for any number of lines.
    """
    patterns = [line.rstrip() for line in shown.splitlines()]
    is_part = "…" in patterns
    lines = [line.rstrip() for line in written.splitlines()]
    for pattern in sorted(set(patterns) - {"…"}, key=lambda each: (each.count("…"), -len(each))):
        glob = re.sub(r"([\[?*])", r"[\1]", pattern).replace("…", "*")
        for _ in range(patterns.count(pattern)):
            found = next((line for line in lines if fnmatch.fnmatchcase(line, glob)), None)
            assert found is not None, (
                f"the page shows {pattern!r}, but the program wrote\n{written}"
            )
            lines.remove(found)
    assert is_part or not lines, f"the page does not show {lines}"


def _has_module(name: str) -> Callable[[], bool]:
    # A folder of this name on the path is a package without an origin.
    return lambda: (spec := find_spec(name)) is not None and spec.origin is not None


def _has_program(name: str) -> Callable[[], bool]:
    beside = str(Path(sys.executable).parent)
    return lambda: (
        shutil.which(name, path=os.pathsep.join([beside, os.environ["PATH"]])) is not None
    )


def _can_build_labs() -> bool:
    argv = [sys.executable, "-m", "r2ccl", "netlab", "--enter", "--", "true"]
    return subprocess.run(argv, capture_output=True, cwd=ROOT, check=False).returncode == 0


#: Names of the things that a block can need, each with a test of whether it is available.
NEEDS: dict[str, Callable[[], bool]] = {
    "netlab": _can_build_labs,
    "torch": _has_module("torch"),
    "mpi4py": lambda: _has_module("mpi4py")() and _has_program("mpiexec.hydra")(),
    "openssl": _has_program("openssl"),
    "cupy": _has_module("cupy"),
    "numba": _has_module("numba"),
    "dask": _has_module("distributed"),
    "jax": _has_module("jax"),
    "ray": _has_module("ray"),
    "cluster": lambda: False,  # tests submit no jobs and log in nowhere
}
