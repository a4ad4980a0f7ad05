"""The backend of ray.util.collective translates the operations of Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from r2ccl import AVG, InvalidArgument
from r2ccl.interop.ray import R2cclGroup


class Operations:
    """Communicator of one rank that notes the operations of the calls."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def allreduce(self, x: Any, op: Any) -> None:
        self.seen.append(op)

    def reduce(self, x: Any, out: Any, op: Any, root: int) -> None:
        self.seen.append(op)

    def reduce_scatter(self, x: Any, out: Any, op: Any) -> None:
        self.seen.append(op)


def call_all(name: str) -> list[Any]:
    """Call every reduction with Ray's operation `name`; return the operations of r2ccl."""
    group = object.__new__(R2cclGroup)
    group._world_size, group._rank = 1, 0
    group.communicator = operations = Operations()  # type: ignore[assignment]
    # The Ray of the tests has no operation AVERAGE; newer ones have.
    options: Any = SimpleNamespace(reduceOp=SimpleNamespace(name=name), root_rank=0)
    x = np.ones(3)
    group.allreduce([x], options)
    group.reduce([x], options)
    group.reducescatter([x], [[x]], options)
    return operations.seen


def test_an_average_of_ray_is_avg() -> None:
    assert call_all("AVERAGE") == [AVG] * 3


def test_an_unknown_operation_of_ray_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"op=MEDIAN of Ray: allowed are SUM, .*AVERAGE"):
        call_all("MEDIAN")
