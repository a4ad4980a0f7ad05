"""r2ccl: collective communication that continues when NICs or links fail.

The names in ``__all__`` are the public interface, to which semantic versioning applies.
``README.md`` has a first program; `r2ccl.testing` has the tools that inject network faults.
"""

from __future__ import annotations

from r2ccl.bootstrap.launch import launch
from r2ccl.communicator import ANY_SOURCE, ANY_TAG, Communicator
from r2ccl.config import Config
from r2ccl.errors import (
    CommunicatorRevoked,
    CompletionError,
    ConcurrentCalls,
    InternalError,
    InvalidArgument,
    NoHealthyRail,
    NoQuorum,
    PeerLost,
    R2cclError,
    RailDown,
    ScheduleError,
    TransportError,
    TransportTimeout,
)
from r2ccl.factory import init
from r2ccl.failover.migration.repairs import Repair
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.runtime.status import HealthReport, Pending
from r2ccl.types import ReduceOp

SUM = ReduceOp.SUM
PROD = ReduceOp.PROD
MIN = ReduceOp.MIN
MAX = ReduceOp.MAX
AVG = ReduceOp.AVG

__version__ = "0.1.0"

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AVG",
    "MAX",
    "MIN",
    "PROD",
    "SUM",
    "Communicator",
    "CommunicatorRevoked",
    "CompletionError",
    "ConcurrentCalls",
    "Config",
    "HealthReport",
    "InternalError",
    "InvalidArgument",
    "Message",
    "MessageRequest",
    "NoHealthyRail",
    "NoQuorum",
    "PeerLost",
    "Pending",
    "R2cclError",
    "RailDown",
    "ReduceOp",
    "Repair",
    "ScheduleError",
    "TransportError",
    "TransportTimeout",
    "init",
    "launch",
]
