"""What a verbs provider reports, for people: work completion statuses and asynchronous events.

Tables and text only. Must not import pyverbs: the numbers are the ABI of libibverbs
(``enum ibv_wc_status`` and ``enum ibv_event_type`` of infiniband/verbs.h), so an error that came
from another machine can be read on one without verbs. Invariant: every number gives a name and a
text, also one that newer headers added.

References
----------
ibv_poll_cq(3), ibv_get_async_event(3); InfiniBand specification, volume 1, chapter 11
"Software transport verbs", completion return statuses and asynchronous events.
"""

from __future__ import annotations

from typing import NamedTuple


class CompletionStatus(NamedTuple):
    """One ``ibv_wc_status``: its name without ``IBV_WC_``, what it means, what to do next."""

    name: str
    meaning: str
    hint: str


class AsyncEvent(NamedTuple):
    """One ``ibv_event_type``: its name without ``IBV_EVENT_``, and what it means."""

    name: str
    meaning: str


_NOT_USED = "r2ccl uses no such service: report it with the device, its driver and its firmware"
_REPORT = "this is a defect of r2ccl: report it with the logs of both ranks"
_DRIVER = "look at dmesg and the device's firmware version"
_REGISTRATION = (
    "memory must stay allocated and registered until the call ends, on this rank and on the peer; "
    "if it did, report it with the logs of both ranks"
)

#: ``ibv_wc_status`` by number.
STATUSES: dict[int, CompletionStatus] = {
    0: CompletionStatus("SUCCESS", "the work request is done", "nothing is wrong"),
    1: CompletionStatus(
        "LOC_LEN_ERR",
        "a message was longer than the receive posted for it, or than the port's limit",
        _REPORT,
    ),
    2: CompletionStatus(
        "LOC_QP_OP_ERR",
        "the local queue pair cannot execute the request: wrong operation, flag or size; Soft-RoCE "
        "also says so of requests under way when a queue pair breaks",
        _REPORT,
    ),
    3: CompletionStatus(
        "LOC_EEC_OP_ERR", "a local end-to-end context refused the request", _NOT_USED
    ),
    4: CompletionStatus(
        "LOC_PROT_ERR",
        "a buffer of the request is not covered by a valid registration on this rank",
        _REGISTRATION,
    ),
    5: CompletionStatus(
        "WR_FLUSH_ERR",
        "the queue pair was in its error state before the request was executed",
        "this is an effect: look for the first failure of the same rail, here or at the peer",
    ),
    6: CompletionStatus("MW_BIND_ERR", "a memory window could not be bound", _NOT_USED),
    7: CompletionStatus(
        "BAD_RESP_ERR",
        "the peer's NIC answered with an opcode that does not fit the request",
        "compare driver and firmware of both NICs, and look for corruption on the wire",
    ),
    8: CompletionStatus(
        "LOC_ACCESS_ERR",
        "an incoming write with immediate met memory of this rank it may not write to",
        _REGISTRATION,
    ),
    9: CompletionStatus(
        "REM_INV_REQ_ERR",
        "the peer's NIC refused the message: an operation its queue pair does not allow, or one "
        "too long for its receive",
        _REPORT,
    ),
    10: CompletionStatus(
        "REM_ACCESS_ERR",
        "the peer's NIC refused the address: wrong remote key, outside of the registration, or "
        "registered without remote write",
        _REGISTRATION,
    ),
    11: CompletionStatus(
        "REM_OP_ERR",
        "the peer's NIC could not complete the operation for a reason of its own",
        "the cause is in the log and the asynchronous events of the peer",
    ),
    12: CompletionStatus(
        "RETRY_EXC_ERR",
        "no acknowledgement from the peer's NIC, however often the packet was sent again",
        "the peer's NIC, cable or switch port is down, or its process is gone; on a path that "
        "never worked compare the GIDs (type, subnet, VLAN) and let UDP port 4791 pass; under "
        "congestion raise R2CC_IB_TIMEOUT or R2CC_IB_RETRY_CNT",
    ),
    13: CompletionStatus(
        "RNR_RETRY_EXC_ERR",
        "the peer's NIC is there, but had no receive posted for too long",
        "see whether the peer's process is stopped or starved of processor time",
    ),
    14: CompletionStatus(
        "LOC_RDD_VIOL_ERR", "two local domains of reliable datagrams differ", _NOT_USED
    ),
    15: CompletionStatus("REM_INV_RD_REQ_ERR", "the peer refused a reliable datagram", _NOT_USED),
    16: CompletionStatus(
        "REM_ABORT_ERR",
        "the peer's side aborted the operation",
        "the cause is in the log and the asynchronous events of the peer",
    ),
    17: CompletionStatus(
        "INV_EECN_ERR", "the number of an end-to-end context is invalid", _NOT_USED
    ),
    18: CompletionStatus(
        "INV_EEC_STATE_ERR", "an end-to-end context is in the wrong state", _NOT_USED
    ),
    19: CompletionStatus("FATAL_ERR", "the device cannot go on with its transport", _DRIVER),
    20: CompletionStatus(
        "RESP_TIMEOUT_ERR",
        "the peer did not answer a request in time",
        "see whether the peer's NIC is up and its process runs",
    ),
    21: CompletionStatus(
        "GENERAL_ERR", "an error the other statuses do not describe", f"{_DRIVER} (vendor code)"
    ),
    22: CompletionStatus("TM_ERR", "tag matching failed", _NOT_USED),
    23: CompletionStatus(
        "TM_RNDV_INCOMPLETE", "a rendezvous of tag matching was left to software", _NOT_USED
    ),
}

#: ``ibv_event_type`` by number.
EVENTS: dict[int, AsyncEvent] = {
    0: AsyncEvent("CQ_ERR", "a completion queue overflowed or broke"),
    1: AsyncEvent("QP_FATAL", "a queue pair broke and cannot report it by a completion"),
    2: AsyncEvent("QP_REQ_ERR", "a queue pair received a request it does not allow"),
    3: AsyncEvent("QP_ACCESS_ERR", "a queue pair received a request that violates local access"),
    4: AsyncEvent("COMM_EST", "a queue pair received its first packet before it could send"),
    5: AsyncEvent("SQ_DRAINED", "a send queue is drained"),
    6: AsyncEvent("PATH_MIG", "a connection went over to its alternate path"),
    7: AsyncEvent("PATH_MIG_ERR", "a connection could not go over to its alternate path"),
    8: AsyncEvent("DEVICE_FATAL", "the device failed as a whole"),
    9: AsyncEvent("PORT_ACTIVE", "a port came up"),
    10: AsyncEvent("PORT_ERR", "a port went down"),
    11: AsyncEvent("LID_CHANGE", "a port has another local identifier (LID)"),
    12: AsyncEvent("PKEY_CHANGE", "a port's table of partition keys changed"),
    13: AsyncEvent("SM_CHANGE", "a port has another subnet manager"),
    14: AsyncEvent("SRQ_ERR", "a shared receive queue broke"),
    15: AsyncEvent("SRQ_LIMIT_REACHED", "a shared receive queue ran low"),
    16: AsyncEvent("QP_LAST_WQE_REACHED", "a queue pair took its last shared receive"),
    17: AsyncEvent("CLIENT_REREGISTER", "the subnet manager asks clients to register again"),
    18: AsyncEvent("GID_CHANGE", "a port's GID table changed"),
    19: AsyncEvent("WQ_FATAL", "a work queue broke"),
    20: AsyncEvent("DEVICE_SPEED_CHANGE", "the device's rate changed"),
}


def status_name(status: int) -> str:
    """Return verbs' own spelling of a status, ``RETRY_EXC_ERR`` for 12."""
    known = STATUSES.get(status)
    return known.name if known else f"UNKNOWN_STATUS_{status}"


def is_completion_status(name: str) -> bool:
    """Whether verbs spells the status of a failed work request like this."""
    return any(status.name == name for number, status in STATUSES.items() if number)


def event_name(event: int) -> str:
    """Return verbs' own spelling of an asynchronous event, ``PORT_ERR`` for 10."""
    known = EVENTS.get(event)
    return known.name if known else f"UNKNOWN_EVENT_{event}"


def describe_status(status: int, vendor_err: int = 0) -> str:
    """Say what a work completion status means and what to do next.

    Parameters
    ----------
    status : int
        ``ibv_wc.status``.
    vendor_err : int
        ``ibv_wc.vendor_err``: the NIC maker's own code, shown if it is not 0.

    Examples
    --------
    >>> describe_status(5, 0xF9)
    'WR_FLUSH_ERR (status 5, vendor error 0xf9): the queue pair was in its error state before the \
request was executed; this is an effect: look for the first failure of the same rail, here or at \
the peer'
    """
    known = STATUSES.get(status)
    meaning, hint = (known.meaning, known.hint) if known else _UNKNOWN
    vendor = f", vendor error {vendor_err:#x}" if vendor_err else ""
    return f"{status_name(status)} (status {status}{vendor}): {meaning}; {hint}"


def describe_event(event: int) -> str:
    """Say what an asynchronous event means.

    Examples
    --------
    >>> describe_event(10)
    'PORT_ERR (event 10): a port went down'
    """
    known = EVENTS.get(event)
    meaning = known.meaning if known else "; ".join(_UNKNOWN)
    return f"{event_name(event)} (event {event}): {meaning}"


_UNKNOWN = ("this number is newer than r2ccl's table", "look it up in infiniband/verbs.h")

__all__ = [
    "EVENTS",
    "STATUSES",
    "AsyncEvent",
    "CompletionStatus",
    "describe_event",
    "describe_status",
    "event_name",
    "is_completion_status",
    "status_name",
]
