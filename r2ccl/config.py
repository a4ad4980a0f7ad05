"""R2CC_* variables (and the NCCL_* spellings users already set) become one frozen `Config`.

Reads the environment it is given and nothing else. Invariant: a `Config` that exists is valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from r2ccl.errors import InvalidArgument


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of a communicator; each field's variable is ``R2CC_`` + its name in capitals.

    Sizes in bytes, times in seconds. The fields listed in `AGREED` shape the wire or the plan
    and must be equal on all ranks; rendezvous compares their digest.
    """

    #: failstop: a broken path ends the call; migrate: its slices move, and no more; balance: and
    #: the work is shared out among the rails that are left; r2cc: and R2CC-AllReduce; auto: all
    #: there is. The published system numbers the first four 0 to 3, which are understood too.
    mode: str = "auto"
    #: Slices up to this size are copied and sent at once, without clear-to-send.
    eager_nbytes: int = 64 << 10
    #: Unconfirmed eager slices a link may have under way (the receiver's slots).
    eager_slots: int = 16
    #: Size of a slice: the unit of pipelining, acknowledgement and replay.
    slice_nbytes: int = 1 << 20
    #: Landing places a receiver names ahead on one link.
    landing_depth: int = 2
    #: Channels of a large collective; 0: chosen from the number of rails.
    channels: int = 0
    #: Schedule of large allreduces: one of `ALGOS`; auto: what is predicted to end first.
    algo: str = "auto"
    #: Number of rails to use; 0: one per interface found (two on loopback).
    rails: int = 0
    #: Interfaces to use, NCCL's syntax: prefixes, ``=`` exact, ``^`` exclude, comma separated.
    socket_ifname: str = ""
    #: Interface that carries data between two ranks with no other rail in common: its name; auto:
    #: the one that carries the rendezvous, unless it is a rail; none: no such interface.
    last_resort: str = "auto"
    #: Whether NICs of different rails reach each other, where two ranks have no rail in common:
    #: full, rail (they do not: a third rank forwards), auto: whatever works first; none: two such
    #: ranks do not go round.
    fabric: str = "auto"
    #: RDMA ports to use, NCCL's syntax (``mlx5_0:1``); empty: all that are ACTIVE; ``none``: none.
    hca: str = ""
    #: Entry of the GID table queue pairs send from; -1: chosen by type and address.
    gid_index: int = -1
    #: Local ACK timeout: a NIC sends again after 4.096 us x 2**this without an acknowledgement ...
    ib_timeout: int = 16
    #: ... and gives the queue pair up after this many times.
    ib_retry_cnt: int = 3
    #: RDMA polls and posts by compiled code: 1, 0 (by pyverbs), auto: 1 but on Soft-RoCE.
    fastpath: str = "auto"
    #: Memory that may be registered at once; what was not used for longest is let go first.
    registration_limit_nbytes: int = 4 << 30
    #: Pinned host memory that collectives on device memory pass through, where rails need that;
    #: where they do not, GPU memory that slices land in.
    bounce_nbytes: int = 64 << 20
    #: GPUs of one node work on each other's memory: 1, 0 (through pinned host memory), auto: where
    #: they can.
    ipc: str = "auto"
    #: No progress for this long with work outstanding starts probes.
    suspicion_timeout_s: float = 0.5
    #: How long a probe may take to be answered.
    probe_timeout_s: float = 0.06
    #: A path that failed is used again after this many good probes in a row ...
    failback_probes: int = 3
    #: ... this far apart; while they fail, the pause doubles up to the cap.
    failback_interval_s: float = 0.1
    failback_cap_s: float = 1.0
    #: Longest time a path that failed again and again has to be good before it is used.
    quarantine_cap_s: float = 300.0
    #: Channels shared out by the rates rails are measured at: 1, 0, auto: where rails are several.
    balance: str = "auto"
    #: No path to a peer for this long: NoHealthyRail.
    no_rail_timeout_s: float = 10.0
    #: No sign of life from a peer's control session for this long: PeerLost.
    peer_timeout_s: float = 10.0
    #: A blocking call gives up after this long (TransportTimeout).
    timeout_s: float = 1800.0
    #: init() and close() give up after this long.
    init_timeout_s: float = 60.0
    #: init() waits this long for all rails, then goes on with those that are up.
    connect_timeout_s: float = 5.0
    #: Congestion control of TCP rails; auto: cubic, on loopback reno; empty: the system's.
    tcp_congestion: str = "auto"
    #: The data loop yields the processor this long before it sleeps in epoll.
    spin_s: float = 50e-6
    #: Port of rank 0's rendezvous; 0: MASTER_PORT + 1, or chosen by the launcher.
    port: int = 0
    #: Hexadecimal secret of the job, or the path of a 0600 file that holds it.
    secret: str = ""
    secret_file: str = ""
    #: Address the control plane binds and announces; empty: derived from the rendezvous.
    control_address: str = ""
    #: ``module:function`` that puts a transport around the one in use; empty: none.
    transport_wrapper: str = ""
    #: JSON file with a fault plan, for a wrapper that has faults strike (testing).
    fault_plan: str = ""
    #: SIGUSR1 or SIGUSR2: the signal that makes a rank write its status; empty: none.
    dump_signal: str = ""
    #: File the status is appended to, ``{rank}`` in its name is filled in; empty: stderr.
    dump_file: str = ""
    #: WARN, INFO or TRACE: what the logger ``r2ccl`` lets through; empty: leave it alone.
    debug: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "mode", MODE_NUMBERS.get(self.mode, self.mode))
        positive = (
            "slice_nbytes", "landing_depth", "eager_slots", "registration_limit_nbytes",
            "bounce_nbytes",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise _bad(name, getattr(self, name), "a number above 0")
        switches = dict.fromkeys(("fastpath", "balance", "ipc"), SWITCHES)
        allowed = {"mode": MODES, "algo": ALGOS, "fabric": FABRICS, **switches}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise _bad(name, getattr(self, name), f"one of {', '.join(values)}")
        if self.debug.upper() not in DEBUG_LEVELS:
            raise _bad("debug", self.debug, f"one of {', '.join(filter(None, DEBUG_LEVELS))}")
        if self.dump_signal not in DUMP_SIGNALS:
            raise _bad("dump_signal", self.dump_signal, f"one of {', '.join(DUMP_SIGNALS[1:])}")
        for name in ("eager_nbytes", "channels", "rails", "port"):
            if getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "0 or more")
        if self.eager_nbytes > 1 << 20:
            raise _bad("eager_nbytes", self.eager_nbytes, "at most 1 MiB")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise _bad(name, getattr(self, name), f"{least} to {most}")
        for name in self.__struct_fields__:
            if name.endswith("timeout_s") and not 0 < getattr(self, name) < 1e9:
                raise _bad(name, getattr(self, name), "seconds, above 0")

    def __repr__(self) -> str:
        """Show the settings, not the secret."""
        shown = (
            f"{name}={'***' if name == 'secret' and self.secret else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"Config({', '.join(shown)})"

    @property
    def is_resilient(self) -> bool:
        """Whether a broken path migrates; with mode failstop it ends the call."""
        return self.mode != "failstop"

    @property
    def is_balanced(self) -> bool:
        """Whether rails get the work they can carry; else all are used as if they were whole."""
        return self.mode not in ("failstop", "migrate")

    @property
    def is_planned(self) -> bool:
        """Whether more than rings may run."""
        return self.mode in ("r2cc", "auto")

    def digest(self) -> str:
        """Fingerprint of the fields all ranks must share."""
        values = msgspec.json.encode([getattr(self, name) for name in AGREED])
        return hashlib.sha256(values).hexdigest()[:16]

    @classmethod
    def from_env(cls, env: Mapping[str, str], **overrides: Any) -> Config:
        """Read every field from `env`; keyword arguments win over the environment.

        Raises
        ------
        InvalidArgument
            A value does not parse or is out of range; names the variable.
        """
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            for variable in (f"R2CC_{field.name.upper()}", *ALIASES.get(field.name, ())):
                if variable in env:
                    try:
                        values[field.name] = msgspec.convert(
                            env[variable], field.type, strict=False
                        )
                    except msgspec.ValidationError as exc:
                        raise InvalidArgument(
                            f"{variable}={env[variable]!r}: {exc}; see docs/tuning.md"
                        ) from exc
                    break
        unknown = overrides.keys() - set(cls.__struct_fields__)
        if unknown:
            raise InvalidArgument(
                f"unknown setting {sorted(unknown)}; known: {', '.join(cls.__struct_fields__)}"
            )
        return cls(**{**values, **overrides})


MODES = ("failstop", "migrate", "balance", "r2cc", "auto")
MODE_NUMBERS = dict(zip("0123", MODES, strict=False))
FABRICS = ("auto", "full", "rail", "none")
SWITCHES = ("0", "1", "auto")
ALGOS = (
    "auto",
    "ring",
    "bridged_ring",
    "recursive_doubling",
    "dissemination",
    "one_shot",
    "tree",
    "r2cc",
    "optcc",
    "leaf_ring",
    "nested_rings",
    "packed_trees",
)

#: Attributes of a queue pair (ibv_modify_qp(3)) have 8, 5 and 3 bits; -1 is our own, and a timeout
#: of 0 is left out because it waits for ever.
RANGES: dict[str, tuple[float, float]] = {
    "gid_index": (-1, 255),
    "ib_timeout": (1, 31),
    "ib_retry_cnt": (0, 7),
    "failback_probes": (1, 1000),
    "failback_interval_s": (1e-3, 3600.0),
    "failback_cap_s": (1e-3, 3600.0),
    "quarantine_cap_s": (0.0, 1e6),
}

#: Spellings of ``debug`` (NCCL's) and the level of the logger ``r2ccl`` each stands for.
DEBUG_LEVELS = {"": 0, "VERSION": 30, "WARN": 30, "INFO": 20, "ABORT": 20, "TRACE": 10}

#: Signals a program may give away; others have a meaning of their own.
DUMP_SIGNALS = ("", "SIGUSR1", "SIGUSR2")

#: Fields that shape the wire format or the plan.
AGREED = (
    "mode",
    "eager_nbytes",
    "eager_slots",
    "slice_nbytes",
    "landing_depth",
    "channels",
    "algo",
    "fabric",
    "bounce_nbytes",
    "ipc",
)

#: Spellings of other libraries that mean the same.
ALIASES: dict[str, tuple[str, ...]] = {
    "socket_ifname": ("NCCL_SOCKET_IFNAME",),
    "hca": ("NCCL_IB_HCA",),
    "gid_index": ("NCCL_IB_GID_INDEX",),
    "ib_timeout": ("NCCL_IB_TIMEOUT",),
    "ib_retry_cnt": ("NCCL_IB_RETRY_CNT",),
    "debug": ("NCCL_DEBUG",),
}


def _bad(name: str, given: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{name}={given!r} (R2CC_{name.upper()}): allowed is {allowed}")


__all__ = ["Config"]
