"""``sbatch`` and ``srun`` on this machine: options, variables and tasks as Slurm documents them."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.stand_ins import start_job

#: Formats of sbatch's option --time, such as 01:00:00 and 2-12.
_TIME = r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}"


def _time(text: str) -> str:
    if not re.fullmatch(_TIME, text):
        raise argparse.ArgumentTypeError(f"invalid time limit {text!r}")
    return text


def _options(*extra: str) -> argparse.ArgumentParser:
    """Return the options of ``sbatch``; options of Slurm that are not listed here are refused."""
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    parser.add_argument("--job-name", "-J", default="sbatch")
    parser.add_argument("--nodes", "-N", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int, default=1)
    parser.add_argument("--time", "-t", type=_time)
    for each in extra:
        parser.add_argument(each, nargs=argparse.REMAINDER)
    return parser


def written_options(script: str) -> list[str]:
    """Return the options in the ``#SBATCH`` lines, which end at the first command."""
    if not script.startswith("#!"):
        raise SystemExit("sbatch: error: This does not look like a batch script: no #! line")
    found: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            found += line.split()[1:]
        elif line.strip() and not line.startswith("#"):
            break
    return found


def sbatch(folder: Path, argv: list[str]) -> int:
    """Start a batch script in the background, on the first node."""
    chosen = _options("command").parse_args(argv)
    if not chosen.command:
        raise SystemExit("sbatch: error: the stand-in needs the name of a script")
    text = Path(chosen.command[0]).read_text(encoding="utf-8")
    options = _options().parse_args(written_options(text))
    # Those of the command line have priority.
    options = _options("command").parse_args(argv, options)
    known = [line.split()[1] for line in (folder / "hosts").read_text().splitlines()]
    if options.nodes > len(known):
        raise SystemExit("sbatch: error: Requested node configuration is not available")
    job = str(os.getpid())
    # Slurm runs a copy, so that a script cannot find files beside it.
    copy = folder / f"script-{job}"
    shutil.copy(chosen.command[0], copy)
    nodes = f"node[1-{options.nodes}]" if options.nodes > 1 else "node1"
    tasks = f"{options.ntasks_per_node}(x{options.nodes})" if options.nodes > 1 else (
        str(options.ntasks_per_node)
    )  # fmt: skip
    total = str(options.nodes * options.ntasks_per_node)
    env = {
        "SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NAME": options.job_name,
        "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(options.nodes), "SLURM_NNODES": str(options.nodes),
        "SLURM_NTASKS": total, "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node), "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_SUBMIT_DIR": str(Path.cwd()), "SLURM_CLUSTER_NAME": "stand-in",
        **_place(0, 0, 0),
    }  # fmt: skip
    interpreter = text.splitlines()[0].removeprefix("#!").split()
    argv = [*interpreter, str(copy), *chosen.command[1:]]
    start_job(folder, job, argv, Path(f"slurm-{job}.out"), {**os.environ, **env})
    print(f"Submitted batch job {job}")
    return 0


def _place(rank: int, node: int, local: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": f"node{node + 1}",
    }  # fmt: skip


def srun(folder: Path, argv: list[str]) -> int:
    """Run a command as the tasks of a job step; outside of a job, on the first node."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--mpi", choices=["none"], required=True)
    parser.add_argument("--kill-on-bad-exit", type=int, choices=[0, 1], default=0)
    parser.add_argument("--ntasks", "-n", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(argv)
    job = os.environ.get("SLURM_JOB_ID", str(os.getpid()))
    ntasks = chosen.ntasks or int(os.environ["SLURM_NTASKS"])
    nnodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    nodes = os.environ.get("SLURM_JOB_NODELIST", "node1")
    per_node = -(-ntasks // nnodes)
    step = {
        "SLURM_JOB_ID": job, "SLURM_JOBID": job, "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": str(nnodes), "SLURM_STEP_NUM_TASKS": str(ntasks),
        "SLURM_NTASKS": str(ntasks), "SLURM_NPROCS": str(ntasks),
    }  # fmt: skip
    tasks = {}
    for rank in range(ntasks):
        place = _place(rank, *divmod(rank, per_node))
        process = subprocess.Popen(chosen.command, env={**os.environ, **step, **place})
        tasks[process.pid] = process
    worst = 0
    while tasks:
        pid, status = os.wait()
        tasks.pop(pid)
        worst = max(worst, code := os.waitstatus_to_exitcode(status) % 256)
        if code and chosen.kill_on_bad_exit:
            for each in tasks:
                os.kill(each, signal.SIGTERM)
    return worst


if __name__ == "__main__":
    _, folder, program, *arguments = sys.argv
    sys.exit({"sbatch": sbatch, "srun": srun}[program](Path(folder), arguments))
