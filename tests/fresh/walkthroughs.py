"""Follows the tutorial and the how-to pages with an installed wheel, outside the checkout.

For each set of packages that pages name behind ``pip install``, this makes a new environment,
installs a wheel of this checkout and these packages, and follows the pages in it literally: it
writes their files, runs their commands and compares the output. It prints which pages it followed
and, for blocks that it left out, what they need.

The system's Python runs it before anything is installed, so it uses only the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.pages import ROOT, follow  # noqa: E402

LOGS = ROOT / "out" / "walkthroughs"
PAGES = ("index.md", "tutorial.md", "howto/*.md")

#: Descriptions of the names in `NEEDS` of support.pages, for the output.
LACKING = {
    "cluster": "hosts to log in to, Slurm or Kubernetes",
    "cupy": "a GPU with CuPy",
    "mpi4py": "mpi4py and mpiexec.hydra",
    "netlab": "user namespaces, or root",
    "openssl": "openssl",
}
#: A page that takes longer is ended and counts as failed.
_PAGE_TIMEOUT_S = 1800.0

#: Command by which a page installs r2ccl: its extras, then further requirements.
_INSTALL = re.compile(r'pip install "\.\[(?P<extras>[\w,]+)\]"(?P<others>[^`\n]*)')


def requirements(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the extras of r2ccl, and the other packages, that a page says to install."""
    found = _INSTALL.search(text)
    return (found["extras"], tuple(shlex.split(found["others"]))) if found else ("compiled", ())


def _build(folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*argv, str(folder), str(ROOT)], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def _install(folder: Path, wheel: Path, extras: str, others: Sequence[str]) -> Path:
    """Make an environment in `folder`; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    argv = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if index := os.environ.get("TORCH_INDEX"):
        argv += ["--extra-index-url", index]
    subprocess.run([*argv, f"{wheel}[{extras}]", *others], check=True)
    return python


def _try(python: Path, page: Path, scratch: Path) -> str:
    """Follow a page in a folder of its own; return the outcome, with what was left out."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    log = LOGS / f"{page.stem}.log"
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    with log.open("w") as out:
        try:
            status = subprocess.run(
                [str(python), __file__, "--follow", str(page), str(folder)],
                stdout=subprocess.PIPE, stderr=out, text=True, cwd=folder,
                env={**kept, "HOME": str(folder)}, timeout=_PAGE_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"FAILED: took longer than {_PAGE_TIMEOUT_S:g} s, see {log}"
    if status.returncode:
        return f"FAILED: see {log}"
    left_out = [LACKING.get(each, each) for each in status.stdout.split()]
    return f"followed, except for what needs {'; '.join(left_out)}" if left_out else "followed"


def _follow(page: Path, folder: Path) -> None:
    """Follow a page with this Python; print what it lacked."""
    for lacking in sorted(set(follow(page, folder, checkout=None))):
        print(lacking)


def main() -> int:
    """Parse the command line, follow the pages, print the table; 1 if any failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", nargs="*", help="such as howto/ray.md; default: all")
    parser.add_argument("--follow", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        _follow(*args.follow)
        return 0
    docs = ROOT / "docs"
    every = [page for pattern in PAGES for page in sorted(docs.glob(pattern))]
    pages = [docs / name for name in args.page] or every
    if unknown := [str(page) for page in pages if page not in every]:
        parser.error(f"no page {', '.join(unknown)} that can be followed")
    LOGS.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="r2ccl-pages-"))
    sets: dict[tuple[str, tuple[str, ...]], list[Path]] = {}
    for page in pages:
        sets.setdefault(requirements(page.read_text(encoding="utf-8")), []).append(page)
    failed = 0
    try:
        wheel = _build(scratch)
        for number, ((extras, others), members) in enumerate(sets.items()):
            print(f"r2ccl[{extras}] {' '.join(others)} ...", flush=True)
            python = _install(scratch / str(number), wheel, extras, others)
            for page in members:
                began_s = time.monotonic()
                outcome = _try(python, page, scratch)
                failed += outcome.startswith("FAILED")
                name, took_s = page.relative_to(docs), time.monotonic() - began_s
                print(f"  {name}: {outcome} ({took_s:.0f} s)", flush=True)
            shutil.rmtree(scratch / str(number))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{len(pages) - failed} pages followed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
