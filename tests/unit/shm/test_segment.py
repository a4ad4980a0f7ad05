"""Segments: sealed, allocated at once, checked when mapped, and passed only to known processes."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from r2ccl.errors import TransportError
from r2ccl.shm.layout import SEGMENT_NBYTES
from r2ccl.shm.message_layout import memory_nbytes, ring_nbytes, rings_at
from r2ccl.shm.segment import Segment


@pytest.fixture
def segment():
    made = Segment.create_of_group(3)
    yield made
    made.close()


def test_size_of_a_segment_cannot_change(segment):
    for nbytes in (0, 4 * SEGMENT_NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, nbytes)


def _allocated(segment):
    return os.fstat(segment.descriptor).st_blocks * 512


def test_pages_are_allocated_at_once(segment):
    assert _allocated(segment) >= SEGMENT_NBYTES


def test_rings_take_memory_once_they_are_used(segment):
    at_first, nbytes = SEGMENT_NBYTES + rings_at(3), ring_nbytes(3)
    assert _allocated(segment) == at_first
    segment.allocate_ring(2)
    assert _allocated(segment) == at_first + nbytes
    segment.messages[rings_at(3) + 2 * nbytes :][:nbytes] = 1
    assert _allocated(segment) == at_first + nbytes


@pytest.mark.parametrize("nranks", [2, 63, 64, 65, 256])
def test_the_memory_of_a_rank_is_bounded(nranks):
    assert SEGMENT_NBYTES + memory_nbytes(nranks) <= 64 << 20
    assert ring_nbytes(nranks) & (ring_nbytes(nranks) - 1) == 0


def test_two_mappings_share_memory(segment):
    other = segment.of_peer(os.dup(segment.descriptor))
    segment.words[5] = 77
    assert other.words[5] == 77
    assert other.address != segment.address
    segment.messages[-1] = 8
    assert other.messages[-1] == 8
    other.close()


def test_memory_without_seals_is_refused():
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SEGMENT_NBYTES)
    with pytest.raises(TransportError, match="with seals 0x0"):
        Segment(descriptor, SEGMENT_NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_of_another_size_is_refused():
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(TransportError, match="memory of 4096 bytes"):
        Segment(descriptor, SEGMENT_NBYTES)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free memory, or use fewer ranks per host"),
        (errno.ENOMEM, "free memory, or use fewer ranks per host"),
        (errno.ENFILE, "the system has reached its limit of open files: .*fs.file-max"),
    ],
)
def test_full_memory_is_an_error_with_advice(monkeypatch, code, advice):
    def refuse(descriptor, offset, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TransportError, match=f"cannot allocate .* {os.strerror(code)}; {advice}$"):
        Segment.create_of_group(3)
    assert os.listdir("/proc/self/fd") == before


def test_withdrawn_bytes_are_private_and_others_stay(segment):
    other = segment.of_peer(os.dup(segment.descriptor))
    segment.data[:] = 1
    start, end = segment.address + 100, segment.address + 3 * 4096 + 50
    segment.mapping.withdraw(start, end)
    other.data[: 5 * 4096] = 2
    own = segment.data[: 5 * 4096]
    assert not own[100 : 3 * 4096 + 50].any()
    assert (own[:100] == 1).all()
    assert (own[3 * 4096 + 50 : 4 * 4096] == 1).all()
    assert (own[4 * 4096 :] == 2).all()
    other.close()


def test_arrays_keep_their_memory_mapped(segment):
    other = segment.of_peer(os.dup(segment.descriptor))
    segment.data[:10] = 7
    view = other.data[:10]
    other.release()
    del other
    assert (view == 7).all()
