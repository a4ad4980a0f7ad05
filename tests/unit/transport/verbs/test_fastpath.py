"""The compiled path against a device in NumPy memory, whose functions are written here."""

import ctypes
import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from r2ccl.errors import TransportError
from r2ccl.testing.fakeverbs import ASYNC_FD, CHANNEL_FD, FakeNic, rates
from r2ccl.transport.verbs import layout
from r2ccl.transport.verbs.fastpath import Poller, Poster

OK, RETRY_EXCEEDED, FLUSHED = 0, 12, 5
#: Numbers: of all receive requests, and of one that is alone.
RECEIVE, MARKER = 1 << 44, 2 << 54

POLL_CQ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Sge(ctypes.Structure):
    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))


class SendWr(ctypes.Structure):
    """``struct ibv_send_wr`` as the compiler lays it out; behind rkey the rest of its unions."""

    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("sg_list", ctypes.POINTER(Sge)),
        ("num_sge", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("send_flags", ctypes.c_uint),
        ("imm_data", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
        ("rest", ctypes.c_uint64 * 9),
    )


class RecvWr(ctypes.Structure):
    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("sg_list", ctypes.POINTER(Sge)),
        ("num_sge", ctypes.c_int),
    )


class Wc(ctypes.Structure):
    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("status", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("vendor_err", ctypes.c_uint32),
        ("byte_len", ctypes.c_uint32),
        ("imm_data", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("src_qp", ctypes.c_uint32),
        ("wc_flags", ctypes.c_uint),
        ("pkey_index", ctypes.c_uint16),
        ("slid", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("dlid_path_bits", ctypes.c_uint8),
    )


class Device:
    """The functions of a table: completions are handed out, requests noted."""

    def __init__(self) -> None:
        self.waiting: list[Wc] = []
        #: What poll_cq was asked for; what it and the posts answer instead of doing their work.
        self.asked: list[int] = []
        self.failure = 0
        self.sent: list[tuple[SendWr, Sge]] = []
        self.received: list[list[tuple[int, int, int, int]]] = []
        self.called_with: list[int] = []
        self._callbacks = POLL_CQ(self._poll), POST(self._send), POST(self._receive)
        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self._callbacks]
        self.nic = FakeNic(*addresses)

    def _poll(self, cq: int, count: int, wcs: int) -> int:
        self.called_with.append(cq)
        self.asked.append(count)
        if self.failure:
            return self.failure
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        ctypes.memmove(wcs, (Wc * len(taken))(*taken), ctypes.sizeof(Wc) * len(taken))
        return len(taken)

    def _send(self, qp: int, wr: int, bad_wr: int) -> int:
        self.called_with.append(qp)
        request = SendWr.from_buffer_copy(ctypes.string_at(wr, ctypes.sizeof(SendWr)))
        assert request.num_sge == 1
        assert request.next is None
        piece = request.sg_list[0]
        self.sent.append((request, Sge(piece.addr, piece.length, piece.lkey)))
        return self.failure

    def _receive(self, qp: int, wr: int | None, bad_wr: int) -> int:
        self.called_with.append(qp)
        chain = []
        while wr is not None:
            request = RecvWr.from_address(wr)
            piece = request.sg_list[0]
            chain.append((request.wr_id, piece.addr, piece.length, piece.lkey))
            wr = request.next
        self.received.append(chain)
        return self.failure

    def poller(self, capacity: int = 8) -> Poller:
        return Poller(self.nic.located(), capacity)

    def poster(self, nreceives: int = 8) -> Poster:
        self.nic.make_qp(5)
        nothing = (0x1000, 0, 99)
        made = Poster(self.nic.located(), self.nic.address("qp"), nothing, nreceives)
        made.number_receives(6)
        return made


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    # A callback refers to its device, which refers to it: neither must outlive the test.
    made._callbacks = ()


def done(wr_id: int, status: int = OK, qp_num: int = 5) -> Wc:
    return Wc(wr_id=wr_id, status=status, opcode=129, vendor_err=3, byte_len=4, imm_data=9,
              qp_num=qp_num, src_qp=77)  # fmt: skip


def ids(found: list[tuple[int, ...]]) -> list[tuple[int, int, int]]:
    """Number, status and queue pair of completions."""
    return [(each[0], each[1], each[5]) for each in found]


# The layout


@pytest.mark.parametrize(
    ("record", "compiled"),
    [(layout.WC, Wc), (layout.SEND_WR, SendWr), (layout.RECV_WR, RecvWr), (layout.SGE, Sge)],
)
def test_records_lie_as_a_compiler_lays_them_out(record: np.dtype[Any], compiled: Any) -> None:
    assert record.itemsize == ctypes.sizeof(compiled)
    for name, (kind, offset, *_) in record.fields.items():  # type: ignore[union-attr]
        field = getattr(compiled, name)
        assert (offset, kind.itemsize) == (field.offset, field.size), name


# Finding what is behind pyverbs


def locate(nic: FakeNic) -> layout.ProviderNic:
    return layout.locate_nic(nic.context, nic.pd, nic.cq, async_fd=ASYNC_FD, channel_fd=CHANNEL_FD)


def test_what_is_behind_the_objects_is_found(device: Device) -> None:
    found = locate(device.nic)
    expected = device.nic.located()
    for name in ("context", "pd", "cq", "poll_cq", "post_send", "post_recv"):
        assert getattr(found, name) == getattr(expected, name)
    assert layout.locate_qp(found, device.nic.make_qp(5)) == device.nic.address("qp")


#: Of each struct, the fields that must be as known from elsewhere.
SPOILED = [
    ("context", "cmd_fd"),
    ("context", "async_fd"),
    ("context", "num_comp_vectors"),
    ("pd", "context"),
    ("pd", "handle"),
    ("cq", "context"),
    ("cq", "channel"),
    ("cq", "cqe"),
    ("channel", "context"),
    ("channel", "fd"),
]


@pytest.mark.parametrize(("struct", "field"), SPOILED)
def test_a_device_that_is_not_as_known_is_refused(device: Device, struct: str, field: str) -> None:
    device.nic.records[struct][field] += 1
    with pytest.raises(TransportError) as refusal:
        locate(device.nic)
    assert refusal.value.status == "LAYOUT"


@pytest.mark.parametrize("field", layout.QP.names)
def test_a_queue_pair_that_is_not_as_known_is_refused(device: Device, field: str) -> None:
    nic = locate(device.nic)
    qp = device.nic.make_qp(5)
    device.nic.records["qp"][field] += 1
    with pytest.raises(TransportError) as refusal:
        layout.locate_qp(nic, qp)
    assert refusal.value.status == "LAYOUT"


@pytest.mark.parametrize(
    "pointer", [0, 8, 0xDEAD000, 1 << 63, (1 << 64) - 8, 0x7FFF_FFFF_FFFF_F000]
)
def test_a_pointer_into_nowhere_is_refused_not_followed(device: Device, pointer: int) -> None:
    device.nic.records["cq"]["channel"] = pointer
    with pytest.raises(TransportError, match="not mapped"):
        locate(device.nic)


@pytest.mark.parametrize("name", ["poll_cq", "post_send", "post_recv"])
def test_a_function_that_is_not_code_is_refused(device: Device, name: str) -> None:
    device.nic.records["context"][name] = device.nic.address("cq")
    with pytest.raises(TransportError, match=f"{name} at 0x[0-9a-f]+ is not code"):
        locate(device.nic)


def test_a_pyverbs_that_shows_less_is_refused(device: Device) -> None:
    del type(device.nic.cq).cqe
    with pytest.raises(TransportError, match="cqe"):
        locate(device.nic)


@pytest.mark.parametrize(
    ("provider", "is_software"),
    [
        ("/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", True),
        ("/usr/lib64/libibverbs/libsiw-rdmav57.so", True),
        ("/usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.44.0", False),
        ("", False),
    ],
)
def test_the_kernel_playing_the_nic_is_known_by_the_provider(
    device: Device, provider: str, is_software: bool
) -> None:
    nic = device.nic.located()
    fields = {name: getattr(nic, name) for name in nic.__struct_fields__}
    assert layout.ProviderNic(**{**fields, "provider": provider}).is_software is is_software


# Polling


def test_completions_come_as_they_are_in_order(device: Device) -> None:
    device.waiting = [done(7 << 50), done(1, RETRY_EXCEEDED, 0xFFFFFF)]
    assert device.poller().poll() == [(7 << 50, 0, 129, 3, 9, 5), (1, 12, 129, 3, 9, 0xFFFFFF)]
    assert set(device.called_with) == {device.nic.address("cq")}


def test_nothing_completed(device: Device) -> None:
    assert device.poller().poll() == []
    assert device.asked == [8]


def test_what_does_not_fit_stays_for_the_next_call(device: Device) -> None:
    device.waiting = [done(each) for each in range(1, 12)]
    poller = device.poller(capacity=8)
    assert [each[0] for each in poller.poll()] == list(range(1, 9))
    assert [each[0] for each in poller.poll()] == [9, 10, 11]


def test_a_drained_queue_pair_tells_one_receive_and_every_marker(device: Device) -> None:
    device.waiting = [done(RECEIVE, FLUSHED)] * 100 + [
        done(MARKER, FLUSHED),
        done(MARKER + 9, FLUSHED),
    ]
    found = device.poller(capacity=8).poll()
    assert ids(found) == [(RECEIVE, 5, 5), (MARKER, 5, 5), (MARKER + 9, 5, 5)]


def test_each_queue_pair_tells_of_its_failure(device: Device) -> None:
    device.waiting = [done(RECEIVE, FLUSHED, qp) for qp in (5, 6) * 50]
    assert ids(device.poller().poll()) == [(RECEIVE, 5, 5), (RECEIVE, 5, 6)]


def test_each_call_tells_of_a_failure_anew(device: Device) -> None:
    """Numbers of queue pairs are used again: what an earlier call told was another one's."""
    poller = device.poller()
    for _ in range(2):
        device.waiting = [done(RECEIVE, FLUSHED)] * 3
        assert ids(poller.poll()) == [(RECEIVE, 5, 5)]


def test_success_and_other_errors_are_never_left_out(device: Device) -> None:
    statuses = [OK, RETRY_EXCEEDED, FLUSHED, RETRY_EXCEEDED, OK]
    device.waiting = [done(RECEIVE, status) for status in statuses]
    assert [each[1] for each in device.poller().poll()] == statuses


def test_a_success_is_no_news_of_a_failure(device: Device) -> None:
    device.waiting = [done(RECEIVE), done(RECEIVE, FLUSHED), done(RECEIVE, FLUSHED)]
    assert [each[1] for each in device.poller().poll()] == [0, 5]


def test_flushes_of_a_queue_pairs_different_lives_are_told_apart(device: Device) -> None:
    device.waiting = [done(number, FLUSHED) for number in (1 << 44, 2 << 44) for _ in range(3)]
    assert [each[0] for each in device.poller().poll()] == [1 << 44, 2 << 44]


def test_left_out_completions_take_no_room(device: Device) -> None:
    device.waiting = [done(RECEIVE, FLUSHED)] * 30 + [done(each) for each in range(1, 8)]
    assert [each[0] for each in device.poller(capacity=8).poll()] == [RECEIVE, *range(1, 8)]


def test_a_queue_that_cannot_be_polled_is_an_error(device: Device) -> None:
    device.failure = -1
    with pytest.raises(OSError, match="poll_cq returned -1"):
        device.poller().poll()


# Posting


def test_a_write_is_posted_as_given(device: Device) -> None:
    poster = device.poster()
    poster.write(
        1 << 54 | 3, 2, 0xDDCCBBAA, (0x7F00_1234_5678, 0xFFFFFFFF, 11), ((1 << 64) - 64, 13)
    )
    poster.write(4, 0, 0, (64, 0, 0), (128, 0xFFFFFFFF))
    (first, piece), (second, empty) = device.sent
    assert (first.wr_id, first.send_flags, first.imm_data) == (1 << 54 | 3, 2, 0xDDCCBBAA)
    assert (first.remote_addr, first.rkey, first.opcode) == ((1 << 64) - 64, 13, 1)
    assert (piece.addr, piece.length, piece.lkey) == (0x7F00_1234_5678, 0xFFFFFFFF, 11)
    assert (second.wr_id, second.send_flags, second.rkey) == (4, 0, 0xFFFFFFFF)
    assert (empty.addr, empty.length, empty.lkey) == (64, 0, 0)
    assert device.called_with == [device.nic.address("qp")] * 2


@pytest.mark.parametrize(
    ("count", "chains"), [(0, []), (1, [1]), (3, [3]), (8, [8]), (9, [8, 1]), (20, [8, 8, 4])]
)
def test_receive_requests_are_chained(device: Device, count: int, chains: list[int]) -> None:
    device.poster(nreceives=8).receive(count)
    assert [len(chain) for chain in device.received] == chains
    assert all(each == (6, 0x1000, 0, 99) for chain in device.received for each in chain)


@pytest.mark.parametrize(
    "post",
    [
        lambda poster: poster.write(1, 0, 0, (64, 0, 0), (64, 0)),
        lambda poster: poster.receive(3),
    ],
    ids=["write", "receive"],
)
def test_a_refusal_is_its_errno(device: Device, post: Callable[[Poster], None]) -> None:
    poster = device.poster()
    device.failure = errno.ENOMEM
    with pytest.raises(OSError, match="Cannot allocate memory") as refusal:
        post(poster)
    assert refusal.value.errno == errno.ENOMEM


#: Both threads post to a barrier of libc's, which returns when the second one is there.
_TWO_THREADS = """
import ctypes, threading
from r2ccl.testing.fakeverbs import FakeNic
from r2ccl.transport.verbs.fastpath import Poster
libc = ctypes.CDLL(None)
wait = ctypes.cast(libc.pthread_barrier_wait, ctypes.c_void_p).value
barrier = ctypes.create_string_buffer(64)
assert libc.pthread_barrier_init(barrier, None, 2) == 0
def post():
    nic = FakeNic(wait, wait, wait).located()
    try:
        Poster(nic, ctypes.addressof(barrier), (0, 0, 0), 1).write(1, 0, 0, (0, 0, 0), (0, 0))
    except OSError as exc:
        assert exc.errno == -1  # what the barrier tells one of them
threads = [threading.Thread(target=post) for _ in range(2)]
for each in threads: each.start()
for each in threads: each.join()
"""


def test_posting_holds_no_gil() -> None:
    subprocess.run([sys.executable, "-c", _TWO_THREADS], check=True, timeout=60)


def test_its_rates_are_measured_without_a_device() -> None:
    measured = rates(batch=64, chain=16, seconds=0.01)
    for name in measured.__struct_fields__:
        assert 0 < getattr(measured, name) < 1e-3, name
