"""One rank of the GPT demo: training with DistributedDataParallel over r2ccl.

``train_gpt.py`` starts this program through a launcher. It reads the text from the folder given on
the command line, prints a line of JSON for each step, and saves its final weights in that folder.
It contains no code for failures, like any program of a user.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from gpt.model import Gpt, Size
from gpt.text import ALPHABET
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch

#: Sequences that each rank trains on in a step.
BATCH_PER_RANK = 2
#: Parts of the training, of each of which the demo reports the loss.
PARTS = 10
LEARNING_RATE = 1e-3
SEED = 2026


def batch(text: Any, context: int, generator: Any) -> tuple[Any, Any]:
    """Return random sequences of `text`, and the tokens that follow each of their tokens."""
    starts = torch.randint(len(text) - context, (BATCH_PER_RANK,), generator=generator)
    rows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def train(comm: r2ccl.Communicator, text: Any, size: Size, nsteps: int) -> tuple[Any, list[int]]:
    """Train for `nsteps` steps; return the model, and the first collective of each step."""
    ninit = comm.ncalls
    torch.manual_seed(SEED)  # all ranks begin with the same weights
    model = DistributedDataParallel(Gpt(size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(SEED + dist.get_rank())  # each has its own batches
    first = []
    for step in range(nsteps):
        tokens, targets = batch(text, size.context, generator)
        loss = model(tokens, targets)
        optimizer.zero_grad()
        first.append(comm.ncalls - ninit)
        begun = time.monotonic()
        loss.backward()  # DistributedDataParallel averages the gradients meanwhile
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        took_s = time.monotonic() - begun
        optimizer.step()
        if dist.get_rank() == 0:
            say(part=step * PARTS // nsteps, loss=mean.item(), begun_s=begun, took_s=took_s)
    return model, first


def say(**fields: Any) -> None:
    """Print `fields` as a line of JSON for ``train_gpt.py``."""
    # One write: without a buffer, `print` writes the end of the line apart, after a log record.
    print(json.dumps(fields) + "\n", end="", flush=True)


def main() -> None:
    """Train, save the final weights and print the repairs."""
    folder, (nsteps, layers, width, context) = Path(sys.argv[1]), map(int, sys.argv[2:])
    text = torch.from_numpy(np.load(folder / "text.npy"))
    dist.init_process_group("r2ccl")
    group = dist.group.WORLD
    assert isinstance(group, r2ccl.torch.R2cclProcessGroup)
    comm = group.communicator
    model, first = train(comm, text, Size(len(ALPHABET), layers, width, context), nsteps)
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    np.save(folder / f"weights-{dist.get_rank()}.npy", weights.numpy())
    repairs = [msgspec.to_builtins(each) for each in comm.repairs()]
    say(rank=dist.get_rank(), repairs=repairs, first_collectives=first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
