"""r2ccl: collective communication that continues when NICs or links fail.

The names in ``__all__`` are the public interface, to which semantic versioning applies.
``README.md`` has a first program; `r2ccl.testing` has the tools that inject network faults.
"""

from __future__ import annotations

from r2ccl.bootstrap.launch import launch
from r2ccl.bootstrap.pool import LaunchPool, launch_pool
from r2ccl.communicator import ANY_SOURCE, ANY_TAG, Communicator
from r2ccl.config import VERSION, Config, Settings
from r2ccl.dtypes import pair_dtype
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
from r2ccl.failover.diagnosis.verdict import Port, Reading, Verdict, VerdictKind
from r2ccl.failover.health.driver import Known
from r2ccl.failover.health.table import Health
from r2ccl.failover.migration.repairs import Repair
from r2ccl.kernels import ConvertedOp, UserOp, accumulate_float32, premul_sum, user_op
from r2ccl.planning.cost_model import Choice
from r2ccl.planning.planner import Explanation
from r2ccl.runtime.async_work import Work
from r2ccl.runtime.engine import RegisteredMemory
from r2ccl.runtime.grouping import Group
from r2ccl.runtime.messages.matching import Message
from r2ccl.runtime.messages.messenger import MessageRequest
from r2ccl.runtime.status import HealthReport, MemoryReport, PathEntry, Pending, RailHealth, Wait
from r2ccl.types import PathKey, ReduceOp

SUM = ReduceOp.SUM
PROD = ReduceOp.PROD
MIN = ReduceOp.MIN
MAX = ReduceOp.MAX
AVG = ReduceOp.AVG
LAND = ReduceOp.LAND
BAND = ReduceOp.BAND
LOR = ReduceOp.LOR
BOR = ReduceOp.BOR
LXOR = ReduceOp.LXOR
BXOR = ReduceOp.BXOR
MINLOC = ReduceOp.MINLOC
MAXLOC = ReduceOp.MAXLOC

__version__ = VERSION

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PROD",
    "SUM",
    "Choice",
    "Communicator",
    "CommunicatorRevoked",
    "CompletionError",
    "ConcurrentCalls",
    "Config",
    "ConvertedOp",
    "Explanation",
    "Group",
    "Health",
    "HealthReport",
    "InternalError",
    "InvalidArgument",
    "Known",
    "LaunchPool",
    "MemoryReport",
    "Message",
    "MessageRequest",
    "NoHealthyRail",
    "NoQuorum",
    "PathEntry",
    "PathKey",
    "PeerLost",
    "Pending",
    "Port",
    "R2cclError",
    "RailDown",
    "RailHealth",
    "Reading",
    "ReduceOp",
    "RegisteredMemory",
    "Repair",
    "ScheduleError",
    "Settings",
    "TransportError",
    "TransportTimeout",
    "UserOp",
    "Verdict",
    "VerdictKind",
    "Wait",
    "Work",
    "accumulate_float32",
    "init",
    "launch",
    "launch_pool",
    "pair_dtype",
    "premul_sum",
    "user_op",
]
