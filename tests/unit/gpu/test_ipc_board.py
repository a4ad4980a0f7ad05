"""What ranks of one node tell each other is read whole, in order, and never overwritten unread."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from r2ccl.errors import InvalidArgument, TransportError
from r2ccl.gpu import ipc_board
from r2ccl.gpu.ipc_board import (
    MESSAGE_NBYTES,
    MOST_RANKS,
    RANK_NBYTES,
    Fence,
    IpcBoard,
    SharedFile,
    load_fence,
)

NLOCAL = 3


@pytest.mark.parametrize("page_nbytes", [4096, 1 << 14, 1 << 16])
def test_the_memory_of_any_ranks_is_whole_pages(page_nbytes: int) -> None:
    """A GPU pins whole pages only (`Device.pin`), which have up to 64 KiB on arm64."""
    assert [n for n in range(1, MOST_RANKS + 1) if n * RANK_NBYTES % page_nbytes] == []


def make_boards(fence: Fence | None = None) -> list[IpcBoard]:
    memory = np.zeros(NLOCAL * RANK_NBYTES, np.uint8)
    return [IpcBoard(memory, index, NLOCAL, fence or load_fence()) for index in range(NLOCAL)]


def word(board: IpcBoard, at: int) -> int:
    return int(board.memory[at : at + 4].view(np.uint32)[0])


def test_messages_are_read_by_number() -> None:
    boards = make_boards()
    assert boards[0].read(1, 1) is None
    boards[1].post(1, b"first")
    boards[1].post(2, b"second")
    assert (boards[0].read(1, 1) or b"").startswith(b"first")
    assert (boards[2].read(1, 2) or b"").startswith(b"second")
    assert boards[0].read(1, 3) is None
    assert boards[0].read(2, 1) is None


def test_a_message_is_kept_until_all_have_taken_it() -> None:
    boards = make_boards()
    number = 1
    while boards[0].may_post(number):
        boards[0].post(number, b"%d" % number)
        number += 1
    assert number > 2
    for board in boards[:2]:
        board.take(1)
        assert not boards[0].may_post(number)
    boards[2].take(1)
    assert boards[0].may_post(number)
    assert not boards[0].may_post(number + 1)
    assert (boards[1].read(0, 2) or b"").startswith(b"2")


class Recorder:
    """Fence that records the messages, and all words, at each of its calls."""

    def __init__(self) -> None:
        self.boards = make_boards(self)
        self.seen: list[bytes] = []

    def __call__(self) -> None:
        self.seen.append(self.boards[0].memory.tobytes())

    def during(self, step: Callable[[], object]) -> tuple[bytes, bytes, bytes]:
        """Return the memory before a step, at its only fence, and after it."""
        self.seen.clear()
        before = self.boards[0].memory.tobytes()
        step()
        (seen,) = self.seen
        return before, seen, self.boards[0].memory.tobytes()


def test_a_fence_separates_a_message_and_its_number() -> None:
    recorder = Recorder()
    before, seen, after = recorder.during(lambda: recorder.boards[1].post(1, b"first"))
    assert b"first" in seen
    assert before != seen != after


def test_a_fence_precedes_the_word_that_frees_a_message() -> None:
    recorder = Recorder()
    before, seen, after = recorder.during(lambda: recorder.boards[1].take(1))
    assert before == seen != after


def test_a_fence_follows_the_word_that_a_rank_has_failed() -> None:
    """The failed rank fences after the word; another rank fences before it reads the word."""
    recorder = Recorder()
    set_word(recorder.boards[1], recorder.boards[1].done_at(1, 1), 7)
    before, seen, after = recorder.during(recorder.boards[1].fail)
    assert before != seen == after
    recorder.during(lambda: recorder.boards[0].failed_before(7))


def test_a_fence_follows_the_words_by_which_a_rank_may_go_on() -> None:
    recorder = Recorder()
    recorder.during(lambda: recorder.boards[0].may_post(1))
    recorder.boards[1].post(1, b"first")
    recorder.during(lambda: recorder.boards[0].read(1, 1))


def test_without_numba_only_arm64_has_no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(maker: str) -> None:
        raise ImportError("numba is not installed, in a test")

    monkeypatch.setattr(ipc_board, "callable_of", refuse)
    monkeypatch.setattr(ipc_board, "MACHINE", "x86_64")
    load_fence()()
    monkeypatch.setattr(ipc_board, "MACHINE", "aarch64")
    with pytest.raises(TransportError, match=r"type aarch64 needs compiled code .* in a test"):
        load_fence()


def test_the_compiled_fence_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_board, "MACHINE", "aarch64")
    boards = make_boards()
    boards[1].post(1, b"first")
    assert (boards[0].read(1, 1) or b"").startswith(b"first")


def test_a_file_that_cannot_be_mapped_is_reported_and_unlinked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On one rank alone, where anything but its report would have the others wait."""
    monkeypatch.setattr("r2ccl.gpu.ipc_board._DIRECTORY", tmp_path)
    _, name = SharedFile.create(RANK_NBYTES)

    def refuse(*_: object) -> None:
        raise OSError(12, "no memory, for a test")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(TransportError, match="no memory"):
        SharedFile.open(name, RANK_NBYTES)
    SharedFile.forget(name)
    SharedFile.forget(name)
    with pytest.raises(TransportError, match="no memory"):
        SharedFile.create(RANK_NBYTES)
    assert not list(tmp_path.iterdir())


def test_numbers_wrap() -> None:
    boards = make_boards()
    near = (1 << 32) - 2
    for board in boards:
        board.take(near - 1)
    for number in range(near, near + 5):
        assert boards[0].may_post(number)
        boards[0].post(number, struct.pack("<Q", number))
        assert boards[1].read(0, number + 1) is None
        found = boards[1].read(0, number)
        assert found is not None
        assert struct.unpack_from("<Q", found) == (number,)
        for board in boards:
            board.take(number)


@pytest.mark.parametrize("base", [0, (1 << 32) - 3])
def test_a_release_changes_own_words_and_never_goes_back(base: int) -> None:
    boards = make_boards()
    places = {
        (reader, writer): [board_at(reader, writer) for board_at in
                           (boards[0].ready_at, boards[0].done_at)]
        for reader in range(NLOCAL) for writer in range(NLOCAL)
    }  # fmt: skip
    assert len({at for each in places.values() for at in each}) == 2 * NLOCAL**2
    for at in (at for each in places.values() for at in each):
        set_word(boards[0], at, base)
    set_word(boards[0], places[1, 0][0], base + 9)
    assert not boards[1].is_complete(base + 5)
    boards[1].release(base + 5)
    for (reader, writer), each in places.items():
        wanted = [base, base] if reader != 1 else [base + (5 if writer else 9), base + 5]
        assert [word(boards[0], at) for at in each] == [each & 0xFFFFFFFF for each in wanted]
    assert [board.is_complete(base + 5) for board in boards] == [False, True, False]


def test_a_round_is_complete_when_all_ranks_have_done_it() -> None:
    boards = make_boards()
    for writer in (1, 2, 0):
        assert not boards[1].is_complete(7)
        assert boards[1].has_done(7) is (writer in (2, 0))
        set_word(boards[0], boards[0].done_at(1, writer), 7)
    assert boards[1].is_complete(7)
    assert not boards[1].is_complete(8)


def test_an_offer_is_mapped_when_all_others_have_mapped_it() -> None:
    boards = make_boards()
    boards[1].mark_mapped(0, 5, 3)
    assert not boards[0].is_mapped(5, 3)
    boards[2].mark_mapped(0, 5, 3)
    assert boards[0].is_mapped(5, 3)
    assert not boards[0].is_mapped(5, 4)
    assert not boards[0].is_mapped(4, 3)
    assert not boards[1].is_mapped(5, 3)


def set_word(board: IpcBoard, at: int, value: int) -> None:
    board.memory[at : at + 4].view(np.uint32)[0] = value & 0xFFFFFFFF


def test_a_message_that_does_not_fit_is_refused() -> None:
    boards = make_boards()
    boards[0].post(1, bytes(MESSAGE_NBYTES))
    with pytest.raises(InvalidArgument, match="at most"):
        boards[0].post(2, bytes(MESSAGE_NBYTES + 1))


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("r2ccl-*")}


def test_a_shared_file_is_one_memory_and_has_no_name_afterwards() -> None:
    before = shared_files()
    mine, name = SharedFile.create(8192)
    assert len(shared_files() - before) == 1
    theirs = SharedFile.open(name, 8192)
    SharedFile.forget(name)
    assert shared_files() == before
    assert not mine.memory.any()
    mine.memory[5000] = 7
    assert theirs.memory[5000] == 7
    with pytest.raises(TransportError, match="cannot open"):
        SharedFile.open(name, 8192)


def test_a_file_of_another_size_or_name_is_refused() -> None:
    made, name = SharedFile.create(4096)
    try:
        assert made.memory.size == 4096
        with pytest.raises(TransportError, match="4096 bytes"):
            SharedFile.open(name, 8192)
        with pytest.raises(InvalidArgument, match="3 bytes"):
            SharedFile.open(b"abc", 4096)
    finally:
        SharedFile.forget(name)


def test_only_its_owner_may_read_a_shared_file() -> None:
    _, name = SharedFile.create(4096)
    try:
        mode = (Path("/dev/shm") / f"r2ccl-{name.hex()}").stat().st_mode
        assert mode & 0o777 == 0o600
    finally:
        SharedFile.forget(name)


def test_a_file_there_is_no_room_for_leaves_nothing() -> None:
    before = shared_files()
    room = os.statvfs("/dev/shm")
    with pytest.raises(TransportError, match="enlarge that file system"):
        SharedFile.create(room.f_blocks * room.f_frsize * 4)
    assert shared_files() == before
