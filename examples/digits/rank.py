"""One rank of the demo: data-parallel training of a small network on handwritten digits.

``train_digits.py`` starts this program through a launcher. It reads the data set from the folder
given on the command line, prints a line of JSON for each step, and saves its final weights in that
folder. It contains no code for failures, like any program of a user.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import r2ccl

Array = np.ndarray[Any, np.dtype[Any]]

#: Units per layer: 4.3 million weights, whose gradient has 16.5 MiB.
LAYERS = (64, 2048, 2048, 10)
BATCH_PER_RANK = 36
LEARNING_RATE = 0.05
SEED = 2026


def layers_of(flat: Array) -> list[tuple[Array, Array]]:
    """Return the weights and bias of each layer, as views of the flat vector `flat`."""
    views, start = [], 0
    for rows, columns in pairwise(LAYERS):
        middle, end = start + rows * columns, start + (rows + 1) * columns
        views.append((flat[start:middle].reshape(rows, columns), flat[middle:end]))
        start = end
    return views


def nweights() -> int:
    """Return the total number of weights and biases."""
    return sum((rows + 1) * columns for rows, columns in pairwise(LAYERS))


def initial_weights() -> Array:
    """Return random initial weights (He et al. 2015), the same on every rank."""
    rng = np.random.default_rng(SEED)
    flat = np.zeros(nweights(), np.float32)
    for weights, _ in layers_of(flat):
        weights[:] = rng.standard_normal(weights.shape, np.float32)
        weights *= np.sqrt(2 / weights.shape[0], dtype=np.float32)
    return flat


def backpropagate(weights: Array, gradient: Array, x: Array, labels: Array) -> float:
    """Write the gradient of the mean cross-entropy of a batch into `gradient`; return the loss.

    `x` has shape (batch, 64), `labels` has shape (batch,), and `weights` and `gradient` are flat.
    ReLU follows every layer except the last.
    """
    layers = layers_of(weights)
    inputs = [x]
    for matrix, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ matrix + bias, 0))
    logits = inputs[-1] @ layers[-1][0] + layers[-1][1]
    logits -= logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    picked = (np.arange(len(x)), labels)
    loss = float((log_sums[:, 0] - logits[picked]).mean())
    delta = np.exp(logits - log_sums)
    delta[picked] -= 1
    delta /= len(x)
    backwards = zip(reversed(layers), reversed(layers_of(gradient)), reversed(inputs), strict=True)
    for (matrix, _), (into_matrix, into_bias), layer_input in backwards:
        np.matmul(layer_input.T, delta, out=into_matrix)
        delta.sum(axis=0, out=into_bias)
        delta = (delta @ matrix.T) * (layer_input > 0)
    return loss


def train(comm: r2ccl.Communicator, x: Array, labels: Array, nepochs: int) -> Array:
    """Train for `nepochs` epochs, with one allreduce per step; return the weights."""
    weights = initial_weights()
    # The last element is the loss, so that one allreduce averages both gradient and loss.
    averaged = np.empty(len(weights) + 1, np.float32)
    batch = comm.nranks * BATCH_PER_RANK
    rng = np.random.default_rng(SEED)  # all ranks shuffle alike; each uses its own part
    for epoch in range(nepochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x) - batch + 1, batch):
            mine = order[start + comm.rank : start + batch : comm.nranks]
            averaged[-1] = backpropagate(weights, averaged[:-1], x[mine], labels[mine])
            begun = time.monotonic()
            comm.allreduce(averaged, op=r2ccl.AVG)
            took_s = time.monotonic() - begun
            weights -= LEARNING_RATE * averaged[:-1]
            if comm.rank == 0:
                say(part=epoch, loss=float(averaged[-1]), begun_s=begun, took_s=took_s)
    return weights


def say(**fields: Any) -> None:
    """Print `fields` as a line of JSON for ``train_digits.py``."""
    # One write: without a buffer, `print` writes the end of the line apart, after a log record.
    print(json.dumps(fields) + "\n", end="", flush=True)


def main() -> None:
    """Train, save the final weights and print the repairs."""
    folder, nepochs = Path(sys.argv[1]), int(sys.argv[2])
    data = np.load(folder / "digits.npz")
    # Mode balance always uses rings. Other modes may change the schedule after a NIC is lost, and
    # with it the order of additions; this demo compares the results of both runs bit for bit.
    with r2ccl.init(mode="balance") as comm:
        weights = train(comm, data["x"], data["labels"], nepochs)
        np.save(folder / f"weights-{comm.rank}.npy", weights)
        say(rank=comm.rank, repairs=[msgspec.to_builtins(each) for each in comm.repairs()])


if __name__ == "__main__":
    main()
