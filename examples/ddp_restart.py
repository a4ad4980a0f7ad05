"""Train with DistributedDataParallel over r2ccl; a rank dies on the way, and torchrun restarts all.

Run: ``torchrun --nproc-per-node 2 --max-restarts 1 examples/ddp_restart.py CHECKPOINT [STEP]``

Rank 0 writes a checkpoint after each step. Rank 1 dies before step STEP, by default 10; never, if
STEP is 20. After the restart, all ranks continue from the checkpoint, and rank 0 prints the time
from the last step before the failure to the first step after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch  # noqa: F401  # registers the backend

NSTEPS = 20


def save(state: dict[str, Any], path: Path) -> None:
    """Replace the file at once: a rank that dies meanwhile leaves the last one."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


def main(path: Path, dies_at: int) -> None:
    dist.init_process_group("r2ccl")
    rank, is_first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    begins_at, died_s = 0, None
    if not is_first:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begins_at, died_s = state["step"] + 1, state["time_s"]
    parallel = DistributedDataParallel(model)
    for step in range(begins_at, NSTEPS):
        if is_first and rank == 1 and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step * 1000 + rank))
        loss = (parallel(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            if died_s is not None:
                print(f"step {step} ended {time.time() - died_s:.1f} s after step {step - 1}")
                died_s = None
            save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "time_s": time.time(),
                },
                path,
            )
    if rank == 0:
        print(f"{NSTEPS} steps: the loss of the last one is {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 10)
