"""r2ccl: collective communication that continues when NICs or links fail.

The names in ``__all__`` are the public interface, to which semantic versioning applies.
``README.md`` has a first program; `r2ccl.testing` has the tools that inject network faults.

Most names are imported on first use, so that ``r2ccl --help`` loads neither NumPy nor the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from r2ccl.config import VERSION, Config, Settings
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
from r2ccl.types import PathKey, ReduceOp

if TYPE_CHECKING:
    from r2ccl.bootstrap.launch import launch
    from r2ccl.bootstrap.pool import LaunchPool, launch_pool
    from r2ccl.communicator import ANY_SOURCE, ANY_TAG, Communicator
    from r2ccl.dtypes import pair_dtype
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
    from r2ccl.runtime.status import (
        HealthReport,
        MemoryReport,
        PathEntry,
        Pending,
        RailHealth,
        Wait,
    )

#: Module of each name that is imported on first use.
_HOMES = {
    "launch": "r2ccl.bootstrap.launch",
    "LaunchPool": "r2ccl.bootstrap.pool",
    "launch_pool": "r2ccl.bootstrap.pool",
    "ANY_SOURCE": "r2ccl.communicator",
    "ANY_TAG": "r2ccl.communicator",
    "Communicator": "r2ccl.communicator",
    "pair_dtype": "r2ccl.dtypes",
    "init": "r2ccl.factory",
    "Port": "r2ccl.failover.diagnosis.verdict",
    "Reading": "r2ccl.failover.diagnosis.verdict",
    "Verdict": "r2ccl.failover.diagnosis.verdict",
    "VerdictKind": "r2ccl.failover.diagnosis.verdict",
    "Known": "r2ccl.failover.health.driver",
    "Health": "r2ccl.failover.health.table",
    "Repair": "r2ccl.failover.migration.repairs",
    "ConvertedOp": "r2ccl.kernels",
    "UserOp": "r2ccl.kernels",
    "accumulate_float32": "r2ccl.kernels",
    "premul_sum": "r2ccl.kernels",
    "user_op": "r2ccl.kernels",
    "Choice": "r2ccl.planning.cost_model",
    "Explanation": "r2ccl.planning.planner",
    "Work": "r2ccl.runtime.async_work",
    "RegisteredMemory": "r2ccl.runtime.engine",
    "Group": "r2ccl.runtime.grouping",
    "Message": "r2ccl.runtime.messages.matching",
    "MessageRequest": "r2ccl.runtime.messages.messenger",
    "HealthReport": "r2ccl.runtime.status",
    "MemoryReport": "r2ccl.runtime.status",
    "PathEntry": "r2ccl.runtime.status",
    "Pending": "r2ccl.runtime.status",
    "RailHealth": "r2ccl.runtime.status",
    "Wait": "r2ccl.runtime.status",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
