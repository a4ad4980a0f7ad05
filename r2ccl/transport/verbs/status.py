"""Names and explanations of verbs' work completion statuses and asynchronous events.

The numbers are the ABI of libibverbs (``enum ibv_wc_status`` and ``enum ibv_event_type`` of
infiniband/verbs.h). This module works without pyverbs, so an error from another machine can be
explained on a machine without verbs. Invariant: every number has a name and a text, even one that
newer headers added.

References
----------
ibv_poll_cq(3), ibv_get_async_event(3); InfiniBand specification, volume 1, chapter 11
"Software transport verbs", completion return statuses and asynchronous events.
"""

from __future__ import annotations

from typing import NamedTuple


class CompletionStatus(NamedTuple):
    """Entry for one ``ibv_wc_status``: name without ``IBV_WC_``, meaning, and what to do next."""

    name: str
    meaning: str
    hint: str


class AsyncEvent(NamedTuple):
    """Entry for one ``ibv_event_type``: name without ``IBV_EVENT_``, and meaning."""

    name: str
    meaning: str


_NOT_USED = (
    "r2ccl does not use this feature: report it with the versions of device, driver and firmware"
)
_REPORT = "this is a defect of r2ccl: report it with the logs of both ranks"
_DRIVER = "look at dmesg and the device's firmware version"
_REGISTRATION = (
    "memory must stay allocated and registered until the call ends, on both ranks of the path; "
    f"if the memory did, {_REPORT}"
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
        "also reports this for requests in flight when a queue pair breaks",
        "on Soft-RoCE, look for the first failure of the same rail, at either end; elsewhere "
        + _REPORT,
    ),
    3: CompletionStatus(
        "LOC_EEC_OP_ERR", "a local end-to-end context refused the request", _NOT_USED
    ),
    4: CompletionStatus(
        "LOC_PROT_ERR",
        "a local buffer of the request is not covered by a valid registration",
        _REGISTRATION,
    ),
    5: CompletionStatus(
        "WR_FLUSH_ERR",
        "the queue pair was in its error state before the request was executed",
        "this is a consequence: look for the first failure of the same rail, at either end",
    ),
    6: CompletionStatus("MW_BIND_ERR", "a memory window could not be bound", _NOT_USED),
    7: CompletionStatus(
        "BAD_RESP_ERR",
        "the peer's NIC answered with an opcode that does not fit the request",
        "compare driver and firmware of both NICs, and look for corruption on the wire",
    ),
    8: CompletionStatus(
        "LOC_ACCESS_ERR",
        "an incoming write with immediate data addressed local memory that it may not write",
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
        "the peer's NIC could not complete the operation because of an error there",
        "the cause is in the log and the asynchronous events of the peer",
    ),
    12: CompletionStatus(
        "RETRY_EXC_ERR",
        "no acknowledgement from the peer's NIC after all retries",
        "the peer's NIC, cable or switch port is down, or its process is gone; on a path that "
        "never worked, compare the GIDs (type, subnet, VLAN) and allow UDP port 4791; under "
        "congestion raise R2CC_IB_TIMEOUT or R2CC_IB_RETRY_CNT",
    ),
    13: CompletionStatus(
        "RNR_RETRY_EXC_ERR",
        "the peer's NIC answered, but it had no receive request posted for too long",
        "check whether the peer's process is stopped or gets too little CPU time",
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
    19: CompletionStatus(
        "FATAL_ERR", "the device had a transport error that it cannot recover from", _DRIVER
    ),
    20: CompletionStatus(
        "RESP_TIMEOUT_ERR",
        "the peer did not answer a request in time",
        "check that the peer's NIC is up and its process runs",
    ),
    21: CompletionStatus(
        "GENERAL_ERR",
        "an error that no other status describes",
        "look at dmesg, the device's firmware version and the vendor error",
    ),
    22: CompletionStatus("TM_ERR", "tag matching failed", _NOT_USED),
    23: CompletionStatus(
        "TM_RNDV_INCOMPLETE", "a tag-matching rendezvous must be completed by software", _NOT_USED
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
    6: AsyncEvent("PATH_MIG", "a connection migrated to its alternate path"),
    7: AsyncEvent("PATH_MIG_ERR", "a connection could not migrate to its alternate path"),
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
    """Return the name of a work completion status, for example ``RETRY_EXC_ERR`` for 12.

    The name of an unknown number contains the number.
    """
    known = STATUSES.get(status)
    return known.name if known else f"UNKNOWN_STATUS_{status}"


def is_completion_status(name: str) -> bool:
    """Return True if `name` is the name of a work completion status other than SUCCESS.

    Return False for the names that `status_name` makes for unknown numbers.
    """
    return any(status.name == name for number, status in STATUSES.items() if number)


def event_name(event: int) -> str:
    """Return the name of an asynchronous event, for example ``PORT_ERR`` for 10.

    The name of an unknown number contains the number.
    """
    known = EVENTS.get(event)
    return known.name if known else f"UNKNOWN_EVENT_{event}"


def describe_status(status: int, vendor_err: int = 0) -> str:
    """Return text that explains a work completion status and says what to do next.

    Parameters
    ----------
    status : int
        ``ibv_wc.status``.
    vendor_err : int
        ``ibv_wc.vendor_err``, the error code of the NIC's vendor; shown if it is not 0.

    Examples
    --------
    >>> describe_status(5, 0xF9)
    'WR_FLUSH_ERR (status 5, vendor error 0xf9): the queue pair was in its error state before the \
request was executed; this is a consequence: look for the first failure of the same rail, at \
either end'
    """
    known = STATUSES.get(status)
    meaning, hint = (known.meaning, known.hint) if known else _UNKNOWN
    vendor = f", vendor error {vendor_err:#x}" if vendor_err else ""
    return f"{status_name(status)} (status {status}{vendor}): {meaning}; {hint}"


def describe_event(event: int) -> str:
    """Return text that explains an asynchronous event.

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
