"""Statuses and events carry verbs' numbers and names, and each tells a person what it means."""

import doctest

import pytest

from r2ccl.transport.verbs import status
from r2ccl.transport.verbs.status import (
    EVENTS,
    STATUSES,
    describe_event,
    describe_status,
    event_name,
    status_name,
)

# The two enumerations of infiniband/verbs.h, in their order; both count from 0.
WC_STATUS = (
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
    "TM_RNDV_INCOMPLETE",
)
EVENT_TYPE = (
    "CQ_ERR",
    "QP_FATAL",
    "QP_REQ_ERR",
    "QP_ACCESS_ERR",
    "COMM_EST",
    "SQ_DRAINED",
    "PATH_MIG",
    "PATH_MIG_ERR",
    "DEVICE_FATAL",
    "PORT_ACTIVE",
    "PORT_ERR",
    "LID_CHANGE",
    "PKEY_CHANGE",
    "SM_CHANGE",
    "SRQ_ERR",
    "SRQ_LIMIT_REACHED",
    "QP_LAST_WQE_REACHED",
    "CLIENT_REREGISTER",
    "GID_CHANGE",
    "WQ_FATAL",
    "DEVICE_SPEED_CHANGE",
)


def test_numbers_are_those_of_the_header() -> None:
    assert {number: each.name for number, each in STATUSES.items()} == dict(enumerate(WC_STATUS))
    assert {number: each.name for number, each in EVENTS.items()} == dict(enumerate(EVENT_TYPE))


def test_installed_verbs_agree() -> None:
    enums = pytest.importorskip("pyverbs.enums", reason="pyverbs has no enums here")
    for number, each in STATUSES.items():
        assert getattr(enums, f"IBV_WC_{each.name}") == number
    for number, known in EVENTS.items():
        # Older headers end earlier.
        assert getattr(enums, f"IBV_EVENT_{known.name}", number) == number


def test_no_two_say_the_same() -> None:
    assert len({each.meaning for each in STATUSES.values()}) == len(STATUSES)
    assert len({each.meaning for each in EVENTS.values()}) == len(EVENTS)


@pytest.mark.parametrize("number", STATUSES)
def test_a_description_has_the_name_the_meaning_and_the_hint(number: int) -> None:
    name, meaning, hint = STATUSES[number]
    assert status_name(number) == name
    assert describe_status(number, 0) == f"{name} (status {number}): {meaning}; {hint}"


@pytest.mark.parametrize(
    ("number", "fragments"),
    [
        (4, ["registration", "registered until the call ends"]),
        (5, ["error state", "first failure of the same rail"]),
        (10, ["remote key", "remote write"]),
        (12, ["down", "GIDs", "4791", "R2CC_IB_TIMEOUT", "R2CC_IB_RETRY_CNT"]),
        (13, ["no receive", "stopped"]),
    ],
)
def test_what_users_meet_leads_somewhere(number: int, fragments: list[str]) -> None:
    assert [each for each in fragments if each not in describe_status(number)] == []


def test_the_vendors_code_is_shown_as_vendors_print_it() -> None:
    assert describe_status(12, 0x81).startswith("RETRY_EXC_ERR (status 12, vendor error 0x81): ")


def test_events_are_described() -> None:
    for number, each in EVENTS.items():
        assert event_name(number) == each.name
        assert describe_event(number) == f"{each.name} (event {number}): {each.meaning}"


@pytest.mark.parametrize("number", [-1, 24, 99])
def test_an_unknown_number_is_told_as_such(number: int) -> None:
    assert status_name(number) == f"UNKNOWN_STATUS_{number}"
    assert event_name(number) == f"UNKNOWN_EVENT_{number}"
    for text in (describe_status(number, 3), describe_event(number)):
        assert str(number) in text
        assert "infiniband/verbs.h" in text


def test_examples_run() -> None:
    assert doctest.testmod(status).failed == 0
