"""Settings of a communicator, read from R2CC_* variables, some NCCL_* variables and keywords.

Invariant: every `Config` has passed the checks of its constructor: the types of its fields, the
allowed values of names and switches, and the ranges of numbers. `Config.from_env` also converts the
text of variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import msgspec

from r2ccl.errors import InvalidArgument

#: Version of the package, which the log of a job names; `r2ccl.__version__`.
VERSION = "0.1.0"


Mode: TypeAlias = Literal["failstop", "migrate", "balance", "r2cc", "auto"]
Algo: TypeAlias = Literal[
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
]
#: Size in bytes of the header that precedes the data of a short message in its envelope.
ENVELOPE_NBYTES = 40


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a communicator; the variable of a field is ``R2CC_`` + its name in capitals.

    Sizes are in bytes, times in seconds. The fields listed in `AGREED` affect the wire format or
    the plan and must be equal on all ranks; rendezvous compares a digest of their values.
    """

    #: Reaction to failures. failstop: a broken path ends the call. migrate: its slices move to
    #: other paths. balance: also, each rail gets work in proportion to the bandwidth it has left.
    #: r2cc: also, R2CC-AllReduce may run. auto: any schedule may run. The numbers 0 to 3, as in the
    #: published R2CCL, are aliases of the first four.
    mode: str = "auto"
    #: Maximum slice size of an op that is sent eagerly: its slices are copied, and sent without
    #: clear-to-send. Also the maximum size of a short message, which does not wait for its receive.
    eager_nbytes: int = 64 << 10
    #: Maximum number of unconfirmed eager slices of a link. Small calls in compiled code may have
    #: up to four times as many, limited so that the memory of that many calls is at most 256 KiB.
    eager_slots: int = 16
    #: Maximum size of the slices that ops are cut into: the units of pipelining, confirmation and
    #: replay.
    slice_nbytes: int = 1 << 20
    #: Maximum number of landing places that a receiver announces ahead of the data on one link.
    landing_depth: int = 2
    #: Maximum number of channels of a large collective; 0: derived from the number of rails.
    channels: int = 0
    #: Schedule of large allreduces in mode auto, one of `ALGOS`; a ring if it is not applicable.
    #: auto: the one with the least predicted time, or a ring if all rails are on loopback. ring:
    #: also restricts the other collectives, as the modes failstop, migrate and balance do.
    algo: str = "auto"
    #: Number of TCP rails to use, not counting that of `last_resort`; 0: one per usable interface
    #: (two on loopback).
    rails: int = 0
    #: Interfaces to use, in NCCL's syntax: comma-separated prefixes, ``=`` exact, ``^`` exclude.
    socket_ifname: str = ""
    #: NICs declared failed, ``host:nic,...``: their paths are not connected until
    #: `Communicator.include`. The host is a host name or the number of a node, the NIC an
    #: interface, an RDMA port or the number of a rail. Each rank may name NICs of any host; the
    #: entries of all ranks apply.
    failed_nics: str = ""
    #: Name of the interface that carries data between two ranks with no other common rail. auto:
    #: the interface of the rendezvous, unless it is a rail; none: no such interface. The setting
    #: has no effect if the rails are on loopback. It has none with RDMA rails either, because all
    #: TCP rails then carry such data.
    last_resort: str = "auto"
    #: Bypass of two ranks without a common rail. full: NICs of different rails reach each other;
    #: rail: they do not, a third rank forwards; auto: whichever connects first; none: no bypass.
    fabric: str = "auto"
    #: RDMA ports to use, in NCCL's syntax (``mlx5_0:1``). none: no RDMA. Empty: all usable ACTIVE
    #: ports, but no RDMA if all ranks are on one host.
    hca: str = ""
    #: Index in the GID table of the address from which queue pairs send; -1: chosen by type and
    #: address.
    gid_index: int = -1
    #: Local ACK timeout of queue pairs: a NIC retransmits after 4.096 us x 2**ib_timeout without an
    #: ACK.
    ib_timeout: int = 16
    #: Number of retransmissions after which a NIC puts the queue pair into the error state.
    ib_retry_cnt: int = 3
    #: Code that polls RDMA completions and posts requests. 1: compiled code if possible, else
    #: pyverbs; 0: pyverbs; auto: 1, except 0 on Soft-RoCE and Soft-iWARP.
    fastpath: str = "auto"
    #: Maximum amount of host memory registered with NICs, and separately of GPU memory; of memory
    #: that is not in use, the least recently used is deregistered first.
    registration_limit_nbytes: int = 4 << 30
    #: Size of each of a rank's two staging memories for collectives on GPU memory. One is GPU
    #: memory that the node's GPUs access directly. The other is GPU memory that slices land in or,
    #: if the rails reach only host memory, pinned host memory. The first memory and pinned host
    #: memory have at least 64 bytes per rank.
    staging_nbytes: int = 64 << 20
    #: Access of a node's GPUs to each other's memory. 1: direct, or an error if it is not possible;
    #: 0: not direct; auto: direct if it is possible between all GPUs of the node.
    ipc: str = "auto"
    #: Shared memory instead of the network: between all ranks if they are on one host; on several
    #: hosts with equally many ranks each, within each host, in some collectives. 1: used, or an
    #: error if ranks of a host cannot share memory; 0: not used; auto: used if they can, unless
    #: `algo` selects a schedule, or faults are injected into the network (testing).
    shm: str = "auto"
    #: Use of compiled code for calls if all rails are TCP rails and no faults are injected
    #: (testing). 1: used, or an error if it cannot be loaded; 0: not used; auto: used if it can be
    #: loaded.
    compiled: str = "auto"
    #: A path is probed after this long without an event while the peer has to send or confirm. A
    #: collective starts the desync check after this long without progress.
    suspicion_timeout_s: float = 0.5
    #: A probe that is not answered within this time has failed.
    probe_timeout_s: float = 0.06
    #: Number of successive probes of a failed path that must be answered before it is used again,
    #: unless no other path to the peer is left.
    failback_probes: int = 3
    #: Interval between probes of a failed path; doubled after each probe that is not answered.
    failback_interval_s: float = 0.1
    #: Upper bound of the doubled `failback_interval_s`; also the interval between further probes
    #: once `failback_probes` have been answered.
    failback_cap_s: float = 1.0
    #: Maximum time that a repeatedly failing path must stay good before it is used again; 0: only
    #: the probes decide.
    quarantine_cap_s: float = 300.0
    #: Division of the work in proportion to the measured rates of the rails, except in modes
    #: failstop and migrate. 1: on; 0: off; auto: on if rails add bandwidth to one another.
    balance: str = "auto"
    #: A call fails with NoHealthyRail after this long without a path to a peer.
    no_rail_timeout_s: float = 10.0
    #: A call fails with PeerLost after this long without a sign of life on the peer's control
    #: session.
    peer_timeout_s: float = 10.0
    #: A call, blocking or asynchronous, fails with TransportTimeout after a wait of this long.
    timeout_s: float = 1800.0
    #: init(), shrink() and close() fail with TransportTimeout after a wait of this long.
    init_timeout_s: float = 60.0
    #: init() waits this long for all rails, then continues with those that are up.
    connect_timeout_s: float = 5.0
    #: A rank with data paths to more ranks than this closes idle paths, the least recently used
    #: first, but none that init() made. 0, or in mode failstop: no limit.
    max_connections: int = 128
    #: Congestion control of TCP rails; auto: cubic, on loopback reno; empty: the system default.
    tcp_congestion: str = "auto"
    #: A waiting data loop calls sched_yield for this long before it sleeps.
    spin_s: float = 50e-6
    #: TCP port of rank 0's rendezvous; 0: MASTER_PORT + 1, or a default: see docs/launching.md.
    port: int = 0
    #: Secret of the job, 64 hexadecimal digits.
    secret: str = ""
    #: Path of a file that holds the secret; owned by the user, and accessible to no other user.
    secret_file: str = ""
    #: Address that the control plane binds and announces; empty: derived from the rendezvous.
    control_address: str = ""
    #: ``module:function`` that wraps the transport in another one; empty: none.
    transport_wrapper: str = ""
    #: JSON file with a fault plan, read by a transport wrapper that injects faults (testing).
    fault_plan: str = ""
    #: Signal on which a rank writes its status: SIGUSR1 or SIGUSR2; empty: none.
    dump_signal: str = ""
    #: File to which the status is appended; ``{rank}`` is replaced by the rank. Empty: stderr.
    dump_file: str = ""
    #: Level of the logger ``r2ccl``, as in NCCL_DEBUG: WARN, INFO, TRACE ...; empty: unchanged.
    debug: str = ""

    def __post_init__(self) -> None:
        for field in _FIELDS:
            value = _typed(field, getattr(self, field.name))
            msgspec.structs.force_setattr(self, field.name, value)
        switches = dict.fromkeys(SWITCHED, SWITCHES)
        allowed = {"mode": MODES, "algo": ALGOS, "fabric": FABRICS, **switches}
        for name, values in allowed.items():
            raw = getattr(self, name)
            given = raw.lower()
            if name == "mode":
                given = MODE_NUMBERS.get(given, given)
            if given not in values:
                numbers = ", or 0 to 3 for the first four" if name == "mode" else ""
                raise _bad(name, raw, f"one of {', '.join(values)}{numbers}")
            msgspec.structs.force_setattr(self, name, given)
        positive = (
            "landing_depth", "eager_slots", "registration_limit_nbytes", "staging_nbytes",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise _bad(name, getattr(self, name), "a number above 0")
        if self.debug.upper() not in DEBUG_LEVELS:
            raise _bad("debug", self.debug, f"one of {', '.join(filter(None, DEBUG_LEVELS))}")
        if self.dump_signal.upper() not in DUMP_SIGNALS:
            raise _bad("dump_signal", self.dump_signal, f"one of {', '.join(DUMP_SIGNALS[1:])}")
        msgspec.structs.force_setattr(self, "dump_signal", self.dump_signal.upper())
        for host, nic in parse_failures(self.failed_nics):
            if not (host and nic):
                raise _bad("failed_nics", self.failed_nics, "host:nic, separated by commas")
        for name in ("eager_nbytes", "channels", "rails", "port", "max_connections"):
            if getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "0 or more")
        if self.eager_nbytes > 1 << 20:
            raise _bad("eager_nbytes", self.eager_nbytes, "at most 1 MiB")
        for name, (least, most) in RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise _bad(name, getattr(self, name), f"{least} to {most}")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is int and value > _MOST:
                raise _bad(name, value, f"at most {_MOST}")
            if name.endswith("timeout_s") and not 0 < value < 1e9:
                raise _bad(name, value, "seconds, above 0 and below 1e9")

    def __repr__(self) -> str:
        """Return all settings with their values, with the secret masked."""
        shown = (
            f"{name}={'***' if name == 'secret' and self.secret else repr(getattr(self, name))}"
            for name in self.__struct_fields__
        )
        return f"Config({', '.join(shown)})"

    @property
    def confirm_after(self) -> int:
        """Number of consumed eager slices after which the receiver of a link confirms them."""
        return max(1, self.eager_slots // 2)

    @property
    def inbox_nbytes(self) -> int:
        """Size of the largest eager payload that can arrive, in bytes.

        This is the data of a short message (`r2ccl.Communicator.send`) with its envelope. It is at
        least 1024: the frame that announces a long message is always eager, even if it is larger
        than `eager_nbytes`.
        """
        return max(self.eager_nbytes + ENVELOPE_NBYTES, 1024)

    @property
    def is_resilient(self) -> bool:
        """True if the slices of a broken path move to other paths; False in mode failstop."""
        return self.mode != "failstop"

    @property
    def is_balanced(self) -> bool:
        """True if plans depend on the health of rails; False if they treat all as healthy."""
        return self.mode not in ("failstop", "migrate")

    @property
    def is_planned(self) -> bool:
        """True in modes r2cc and auto: large calls may run schedules besides rings and chains."""
        return self.mode in ("r2cc", "auto")

    @property
    def fixed_family(self) -> str:
        """Family of schedules that ``algo`` selects (in mode auto only); empty if none."""
        return self.algo if self.mode == "auto" and self.algo != "auto" else ""

    def digest(self) -> str:
        """Return a fingerprint of the fields in `AGREED`, which rendezvous compares."""
        values = msgspec.json.encode([getattr(self, name) for name in AGREED])
        return hashlib.sha256(values).hexdigest()[:16]

    def with_timeout(self, timeout_s: float | None) -> Config:
        """Return these settings with another ``timeout_s``, or unchanged if `timeout_s` is None.

        Raises
        ------
        InvalidArgument
            If `timeout_s` is not a number of seconds above 0 and below 1e9.
        """
        if timeout_s is None:
            return self
        (field,) = (each for each in msgspec.structs.fields(Config) if each.name == "timeout_s")
        return msgspec.structs.replace(self, timeout_s=_typed(field, timeout_s))

    @classmethod
    def from_env(cls, env: Mapping[str, str], **overrides: Any) -> Config:
        """Return a `Config` with the values of the variables in `env` and of `overrides`.

        Parameters
        ----------
        env : mapping
            Environment variables as text.
        **overrides
            Fields by name, which take precedence over variables. Values have the types in
            `Settings`; NumPy numbers are converted.

        Raises
        ------
        InvalidArgument
            If a value does not parse or is not allowed (the message names the variable), or an
            override is not a field or has a wrong type.
        """
        values: dict[str, Any] = _published_failures(env)
        for field in _FIELDS:
            for variable in (f"R2CC_{field.name.upper()}", *ALIASES.get(field.name, ())):
                if variable in env:
                    try:
                        values[field.name] = msgspec.convert(
                            env[variable], field.type, strict=False
                        )
                    except msgspec.ValidationError:
                        allowed = _number_like(field, env[variable])
                        raise InvalidArgument(
                            f"{variable}={env[variable]!r}: allowed is {allowed}; see the page "
                            "Settings of the documentation"
                        ) from None
                    break
            if field.name in overrides:
                values[field.name] = overrides[field.name]
        for name in sorted(overrides.keys() - set(cls.__struct_fields__)):
            if name in _PLACES:
                raise InvalidArgument(
                    f"unknown setting {name}: its value is taken from the environment variable "
                    f"{_PLACES[name]}, not from an argument; start the process with "
                    "`r2ccl launch -n 4 -- python script.py`, or set RANK, WORLD_SIZE, "
                    "MASTER_ADDR, MASTER_PORT and R2CC_SECRET"
                )
            near = nearest(name, cls.__struct_fields__)
            advice = f"did you mean {near}? known" if near else "known"
            raise InvalidArgument(
                f"unknown setting {name}; {advice}: {', '.join(cls.__struct_fields__)}"
            )
        return cls(**values)


#: Fields of `Config` with their types; finding the types takes 1 ms.
_FIELDS = msgspec.structs.fields(Config)


class Settings(TypedDict, total=False):
    """Keywords of `r2ccl.init`: the fields of `Config`, which explains them.

    The mode and the switches may also be numbers.
    """

    mode: Mode | str | int
    eager_nbytes: int
    eager_slots: int
    slice_nbytes: int
    landing_depth: int
    channels: int
    algo: Algo | str
    rails: int
    socket_ifname: str
    failed_nics: str
    last_resort: str
    fabric: str
    hca: str
    gid_index: int
    ib_timeout: int
    ib_retry_cnt: int
    fastpath: str | int
    registration_limit_nbytes: int
    staging_nbytes: int
    ipc: str | int
    shm: str | int
    compiled: str | int
    suspicion_timeout_s: float
    probe_timeout_s: float
    failback_probes: int
    failback_interval_s: float
    failback_cap_s: float
    quarantine_cap_s: float
    balance: str | int
    no_rail_timeout_s: float
    peer_timeout_s: float
    timeout_s: float
    init_timeout_s: float
    connect_timeout_s: float
    max_connections: int
    tcp_congestion: str
    spin_s: float
    port: int
    secret: str
    secret_file: str
    control_address: str
    transport_wrapper: str
    fault_plan: str
    dump_signal: str
    dump_file: str
    debug: str


MODES: tuple[Mode, ...] = get_args(Mode)
MODE_NUMBERS = dict(zip("0123", MODES, strict=False))
FABRICS = ("auto", "full", "rail", "none")
SWITCHES = ("0", "1", "auto")
#: Fields whose values are `SWITCHES`.
SWITCHED = ("fastpath", "balance", "ipc", "shm", "compiled")
ALGOS: tuple[Algo, ...] = get_args(Algo)

#: Smallest and largest value of a field. The first three are attributes of a queue pair of 8, 5
#: and 3 bits (ibv_modify_qp(3)). r2ccl also allows the ``gid_index`` -1, and does not allow the
#: ``ib_timeout`` 0, which waits forever. Several slices must fit into the memory of each rank.
RANGES: dict[str, tuple[float, float]] = {
    "gid_index": (-1, 255),
    "ib_timeout": (1, 31),
    "ib_retry_cnt": (0, 7),
    "slice_nbytes": (1, 1 << 30),
    "failback_probes": (1, 1000),
    "failback_interval_s": (1e-3, 3600.0),
    "failback_cap_s": (1e-3, 3600.0),
    "quarantine_cap_s": (0.0, 1e6),
    "spin_s": (0.0, 1e6),
}

#: Largest value of a field that is an integer: 1 TiB, if the field is a number of bytes.
_MOST = 1 << 40

#: Values of ``debug``, which are NCCL's, and the Python logging level that each sets.
DEBUG_LEVELS = {"": 0, "VERSION": 30, "WARN": 30, "INFO": 20, "ABORT": 20, "TRACE": 10}

#: Fields that are names of files, which may have any bytes but 0.
_FILES = ("secret_file", "fault_plan", "dump_file")

#: Allowed values of ``dump_signal``: the signals POSIX leaves to the program, or none.
DUMP_SIGNALS = ("", "SIGUSR1", "SIGUSR2")

#: Fields that affect the wire format or the plan, and must be equal on all ranks.
AGREED = (
    "mode",
    "eager_nbytes",
    "eager_slots",
    "slice_nbytes",
    "landing_depth",
    "channels",
    "algo",
    "fabric",
    "balance",
    "staging_nbytes",
    "ipc",
    "shm",
)

#: Variables of NCCL that set the same field; the R2CC_ variable takes precedence.
ALIASES: dict[str, tuple[str, ...]] = {
    "socket_ifname": ("NCCL_SOCKET_IFNAME",),
    "hca": ("NCCL_IB_HCA",),
    "gid_index": ("NCCL_IB_GID_INDEX",),
    "ib_timeout": ("NCCL_IB_TIMEOUT",),
    "ib_retry_cnt": ("NCCL_IB_RETRY_CNT",),
    "debug": ("NCCL_DEBUG",),
}

#: Keywords by which other libraries set a process's rank and job, and r2ccl's variables for them.
_PLACES = {
    "rank": "RANK", "world_size": "WORLD_SIZE", "nranks": "WORLD_SIZE", "size": "WORLD_SIZE",
    "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT",
}  # fmt: skip


def parse_failures(text: str) -> tuple[tuple[str, str], ...]:
    """Return host and NIC of each entry of ``host:nic,...``; a missing part is empty."""
    entries = (each.strip().partition(":") for each in text.split(",") if each.strip())
    return tuple((host.strip(), nic.strip()) for host, _, nic in entries)


def _published_failures(env: Mapping[str, str]) -> dict[str, Any]:
    """Return a dict with ``failed_nics`` from R2CC_FAILED_HCA and R2CC_FAILED_NODE.

    The published R2CCL implementation reads these two variables. The dict is empty if they name no
    NIC.

    Raises
    ------
    InvalidArgument
        If a NIC is a number, which would have another meaning in ``failed_nics``.
    """
    names = env.get("R2CC_FAILED_HCA", "").replace(",", " ").split()
    if any(name.isdigit() for name in names):
        raise InvalidArgument(
            f"R2CC_FAILED_HCA={env['R2CC_FAILED_HCA']!r}: give the names of NICs, such as mlx5_2, "
            "not their numbers"
        )
    node = env.get("R2CC_FAILED_NODE", "0")
    return {"failed_nics": ",".join(f"{node}:{name}" for name in names)} if names else {}


def nearest(name: str, names: Sequence[str]) -> str:
    """Return the entry of `names` that is most similar to `name`; "" if none is similar.

    ``timeout_s`` is most similar to ``timeout``, and ``debug`` to ``debug_file``.
    """
    from difflib import get_close_matches  # only for an error or a warning

    # Close matches omit timeout_s for timeout, which lacks only a unit.
    longer = [each for each in names if each.startswith(f"{name}_")]
    stem = max((each for each in names if name.startswith(f"{each}_")), key=len, default="")
    # For debug_file, debug precedes dump_file; for secret_files, secret_file precedes secret.
    close = [each for each in get_close_matches(name, names, 1) if each.startswith(stem)]
    return next(filter(None, (*longer, *close, stem)), "")


def _typed(field: msgspec.structs.FieldInfo, given: Any) -> Any:
    """Return the value of a field in its type: str, int or float.

    ``mode`` and the fields in `SWITCHED` have type str, but may be given as an int, for example 1
    for ``"1"``.

    Raises
    ------
    InvalidArgument
        If the value has another type, is an integer too large for a float, or is text that messages
        to other ranks or system calls cannot hold. A bool is not a number, and text is not parsed.
    """
    kind = field.type
    accepted: Any = {str: str, int: Integral, float: Real}[kind]
    if field.name in ("mode", *SWITCHED):
        accepted = (str, Integral)
    if isinstance(given, accepted) and not isinstance(given, bool):
        with contextlib.suppress(OverflowError):  # an int beyond the range of floats
            value = kind(given)
            if kind is str:
                _check_text(field.name, value)
            return value
    allowed = f"a value of type {kind.__name__}"
    if kind is not str:
        allowed = f"{_number_like(field, str(given))}, of type {kind.__name__}"
    elif isinstance(accepted, tuple):
        allowed = f"{allowed}, such as {field.default!r}, or a number"
    raise _bad(field.name, given, allowed)


def _check_text(name: str, value: str) -> None:
    """Refuse a value with a null character or, unless it names a file, one that is not UTF-8."""
    is_file = name in _FILES
    is_text = "\0" not in value
    try:
        value.encode(errors="surrogateescape" if is_file else "strict")
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        allowed = "text without null characters" + ("" if is_file else ", in UTF-8")
        raise _bad(name, value, allowed)


#: Factors of the units that users write after a number of seconds, and after one of bytes.
_SECONDS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "min": 60, "h": 3600}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _number_like(field: msgspec.structs.FieldInfo, given: str) -> str:
    """Return the kind of number that a field allows, with an example.

    If `given` is a number of bytes or seconds, with or without a unit, the example is its value;
    otherwise, the example is the default.
    """
    is_size = field.name.endswith("nbytes")
    example: Any = field.default
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", given.strip().lower())
    if found is not None and (is_size or field.type is float):
        number, unit = found.groups()
        factor = _BYTES.get(re.sub("i?b$", "", unit)) if is_size else _SECONDS.get(unit)
        example = example if factor is None else float(number) * factor
    if field.type is float:
        return f"a number of seconds, such as {example:g}"
    return f"a whole number{' of bytes' * is_size}, such as {int(example)}"


def _bad(name: str, given: object, allowed: str) -> InvalidArgument:
    also = "".join(f" or {variable}" for variable in ALIASES.get(name, ()))
    shown = "***" if name == "secret" else given
    return InvalidArgument(f"{name}={shown!r} (R2CC_{name.upper()}{also}): allowed is {allowed}")


__all__ = [
    "ENVELOPE_NBYTES",
    "VERSION",
    "Algo",
    "Config",
    "Mode",
    "Settings",
    "nearest",
    "parse_failures",
]
