"""Flow-level simulator: a schedule, a network, failures -> time; 1,024 nodes and more.

Imports down only: `schedule`, `errors`, NumPy and Numba; no socket, thread, clock or random source.
Invariant: it runs the very `Schedule` objects that the executor runs, and reads of them what the
executor reads: who sends what to whom, and what waits for what.

============ =====================================================================================
`network`    nodes, ports, and what happens to them
`program`    a schedule, made compact
`slices`     how its data is cut
`routes`     which ports a link uses, given what is alive
`build`      the state everything starts from
`loops`      what happens next: the part that is compiled
`simulation` all of it
`outcome`    what came out
`training`   a training step, given how long allreduces take
`serving`    a prefill and a decode step, likewise
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
