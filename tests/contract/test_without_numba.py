"""A job without Numba and llvmlite works over TCP, and says what is off and how to get it.

So does a job whose llvmlite is damaged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import r2ccl

REMEDY = 'pip install "r2ccl[compiled]"'
PROGRAM = """
import sys
import ml_dtypes, numpy as np, r2ccl

def main():
    with r2ccl.init() as comm:
        x = comm.allreduce(np.full(50_000, comm.rank + 1.0))
        said = []
        for op in (r2ccl.SUM, r2ccl.AVG, r2ccl.premul_sum(2), r2ccl.accumulate_float32()):
            for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
                try:
                    comm.allreduce(np.ones(3, dtype), op=op)
                except r2ccl.InvalidArgument as exc:
                    said.append(sys.argv[1] in str(exc))
        moved = comm.allgather(np.full(2, comm.rank, np.float16))
        got = comm.sendrecv(np.ones(2), 1 - comm.rank, np.empty(2))
        return bool((x == 3).all()), said == [True] * 12, moved.tolist(), got.count

if __name__ == "__main__":
    print(r2ccl.launch(main, 2))
"""


def run_program(folder: Path, remedy: str) -> str:
    """Run the program in `folder`, whose modules come first; return what it writes to stderr.

    Errors of the program must contain `remedy`.
    """
    (folder / "program.py").write_text(PROGRAM, encoding="ascii")
    root = Path(r2ccl.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{folder}:{root}"}
    ended = subprocess.run(
        (sys.executable, "program.py", remedy), cwd=folder, env=env, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    one = "(True, True, [[0.0, 0.0], [1.0, 1.0]], 2)"
    assert ended.stdout.strip() == f"[{one}, {one}]"
    assert ended.stderr.count("shared memory and compiled calls are off") == 1
    assert remedy in ended.stderr
    return ended.stderr


def test_a_job_without_numba_works_and_says_what_is_slower(tmp_path: Path) -> None:
    # An import of a module that is None fails as that of one that is not installed.
    hide = "import sys\nsys.modules['numba'] = sys.modules['llvmlite'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hide, encoding="ascii")
    run_program(tmp_path, REMEDY)


@pytest.mark.parametrize(
    ("package", "binding"),
    [
        ("raise ImportError('it is damaged')", ""),
        ("", "raise OSError('it is damaged')"),
        ("", "def __getattr__(name):\n    raise OSError('it is damaged')"),
    ],
    ids=["package", "import", "use"],
)
def test_a_job_with_a_damaged_llvmlite_works_likewise(
    package: str, binding: str, tmp_path: Path
) -> None:
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite/__init__.py").write_text(package, encoding="ascii")
    (tmp_path / "llvmlite/binding.py").write_text(binding, encoding="ascii")
    assert "it is damaged" in run_program(tmp_path, "pip install --force-reinstall llvmlite")
