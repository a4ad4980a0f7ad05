"""Flow-level simulator: predicts the time of a schedule on a network with failures.

The simulator runs the same `Schedule` objects as the executor, with all their ops and dependencies.
It scales to 1,024 nodes.

============ =====================================================================================
`network`    nodes, ports and their bandwidth changes
`program`    compact form of a schedule
`slices`     sizes of chunks and slices
`routes`     ports of each link, given which ports are alive
`build`      state at time 0
`loops`      compiled event loops
`simulation` `simulate`: the whole run
`outcome`    result of a simulation
`choices`    schedules that the planner chooses on a cluster with lost and slow NICs
`training`   time of a training step, given the times of its allreduces
`serving`    time of a prefill and of a decode step, given the time of an allreduce
============ =====================================================================================
"""

from __future__ import annotations

from r2ccl.flowsim.network import Change, Network
from r2ccl.flowsim.outcome import Bottleneck, Outcome, Use
from r2ccl.flowsim.program import Program, compile_schedule
from r2ccl.flowsim.routes import Rails
from r2ccl.flowsim.simulation import Sharing, simulate

__all__ = [
    "Bottleneck",
    "Change",
    "Network",
    "Outcome",
    "Program",
    "Rails",
    "Sharing",
    "Use",
    "compile_schedule",
    "simulate",
]
