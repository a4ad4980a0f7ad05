"""Control planes of more ranks than have sessions with each other; every rank is a thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
from support.planes import Job, Number, Text
from support.planes import start_job as start_job  # the fixture

from r2ccl.bootstrap import Goodbye, PeerDown
from r2ccl.bootstrap.overlay import neighbors

NRANKS = 9
#: Rank 4 is no neighbor of rank 1 and of rank 7, all of whose neighbors are neighbors of rank 4.
FAR = 4, 1


def test_sessions_are_only_with_neighbors(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    for rank, plane in enumerate(job.planes):
        assert set(plane._sessions) == neighbors(rank, NRANKS) == plane.neighbors
        assert plane.last_heard(min(plane.neighbors)) is not None
    assert job.planes[FAR[0]].last_heard(FAR[1]) is None


def test_messages_to_all_ranks_arrive_once_and_in_order(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    for rank, plane in enumerate(job.planes):
        for value in range(50):
            plane.broadcast(Number(value))
            for peer in range(NRANKS):
                if peer != rank:
                    plane.send(peer, Text(str(value)))
    for rank, recorder in enumerate(job.seen):
        recorder.wait_for(lambda r=recorder: len(r.messages) == 100 * (NRANKS - 1))
        for peer in set(range(NRANKS)) - {rank}:
            told = [message for who, message in recorder.messages if who == peer]
            assert [m.value for m in told if isinstance(m, Number)] == list(range(50))
            assert [int(m.value) for m in told if isinstance(m, Text)] == list(range(50))
    assert all(set(plane._sessions) == plane.neighbors for plane in job.planes)


def test_gossip_reaches_the_neighbors_only(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    near = sorted(neighbors(0, NRANKS))
    job.planes[0].gossip(Text("news"), near[0])
    for peer in near[1:]:
        job.seen[peer].wait_for(lambda p=peer: job.seen[p].messages == [(0, Text("news"))])
    for peer in set(range(1, NRANKS)) - set(near[1:]):
        assert job.seen[peer].messages == []


def test_a_session_opened_by_both_ends_carries_their_messages(
    start_job: Callable[..., Job],
) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    for rank, peer in (FAR, FAR[::-1]):
        job.planes[rank].open_session(peer)
        job.planes[rank].send(peer, Text("directly"))
        job.planes[rank].open_session(peer)
    for rank, peer in (FAR, FAR[::-1]):
        job.seen[rank].wait_for(
            lambda r=rank, p=peer: (p, Text("directly")) in job.seen[r].messages
        )
        job.seen[rank].wait_for(lambda r=rank, p=peer: job.planes[r].last_heard(p) is not None)
    job.planes[FAR[0]].close(2.0)
    job.seen[FAR[1]].wait_for(lambda: (FAR[0], Goodbye()) in job.seen[FAR[1]].messages)


def test_the_last_message_arrives_before_goodbye(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    leaver, far = job.planes[FAR[0]], job.seen[FAR[1]]
    for rank, peer in (FAR, FAR[::-1]):
        job.planes[rank].open_session(peer)
    leaver.send(FAR[1], Text("directly"))
    far.wait_for(lambda: far.messages == [(FAR[0], Text("directly"))])
    for rank in leaver.neighbors:  # they pass the broadcast on late
        job.planes[rank].call_soon(lambda: time.sleep(0.3))
    leaver.broadcast(Number(1))
    leaver.tell_contacts(Number(1))
    leaver.close(2.0)
    far.wait_for(lambda: (FAR[0], Goodbye()) in far.messages)
    assert far.messages[1:] == [(FAR[0], Number(1)), (FAR[0], Goodbye())]


def test_a_session_that_one_end_opens_is_accepted(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    low, high = sorted(FAR)
    job.planes[low].open_session(high)
    job.planes[low].send(high, Text("unexpected"))
    job.seen[high].wait_for(lambda: (low, Text("unexpected")) in job.seen[high].messages)
    job.planes[high].send(low, Text("answer"))
    job.seen[low].wait_for(lambda: (high, Text("answer")) in job.seen[low].messages)


def test_a_data_connection_needs_no_session(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    low, high = sorted(FAR)
    job.planes[high].accept_path(low, 1, 3)
    job.planes[low].dial_path(high, 1, 3)
    for rank, peer in ((low, high), (high, low)):
        job.seen[rank].wait_for(lambda r=rank, p=peer: (p, 1, 3) in job.seen[r].paths)
    assert isinstance(job.seen[low].paths[high, 1, 3], socket.socket)


def test_all_ranks_learn_of_a_loss_and_who_found_it(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    job.planes[5].close(0)
    witnesses = neighbors(5, NRANKS)
    for rank in set(range(NRANKS)) - {5}:
        recorder = job.seen[rank]
        recorder.wait_for(lambda r=recorder: 5 in r.lost)
        if rank not in witnesses:
            named = int(recorder.lost[5].rpartition("says rank ")[2])
            assert named in witnesses
        assert set(recorder.lost) == {5}


def test_messages_avoid_ranks_that_are_gone(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    rank, peer = FAR
    closed = sorted(neighbors(rank, NRANKS))[:-1]
    for each in closed[::2]:
        job.planes[each].close(2.0)
    for each in closed[1::2]:
        job.planes[each].close(0)
    ready = sorted(set(range(NRANKS)) - set(closed) - {rank})
    for each in (*ready, rank):
        job.seen[each].wait_for(lambda r=each: set(job.seen[r].lost) >= set(closed[1::2]))
    for each in ready:
        job.planes[rank].send(each, Text("around"))
        job.seen[each].wait_for(lambda r=each: (rank, Text("around")) in job.seen[r].messages)
    job.planes[rank].broadcast(Text("to all"))
    for each in ready:
        job.seen[each].wait_for(lambda r=each: (rank, Text("to all")) in job.seen[r].messages)
    assert peer in ready


def test_a_rank_without_neighbors_has_lost_all_ranks(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    plane = job.planes[0]
    for peer in plane.neighbors:
        plane.call_soon(lambda p=peer: plane._sessions[p].lose("a test says so"))
    job.seen[0].wait_for(lambda: set(job.seen[0].lost) == set(range(1, NRANKS)))
    far = set(range(1, NRANKS)) - plane.neighbors
    assert {job.seen[0].lost[rank] for rank in far} == {"every route to it contains a lost rank"}


def test_a_rank_given_up_tells_when_it_heard_the_others(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    near = min(job.planes[FAR[0]].neighbors)
    job.planes[near].gossip(PeerDown(FAR[0], "silent for 99.0 s", FAR[1], 99.0))
    seen = job.seen[FAR[0]]
    seen.wait_for(lambda: seen.lost.keys() >= {near, FAR[1]})
    assert seen.lost[near] == f"it counts rank {FAR[0]} as lost: silent for 99.0 s"
    silence_s = seen.silent_s[near]
    assert silence_s is not None
    assert silence_s < 10.0
    assert seen.silent_s[FAR[1]] is None  # there is no session with it


def test_a_session_gives_way_until_it_has_a_message(
    start_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    monkeypatch.setattr("r2ccl.bootstrap.peer._GIVE_WAY_S", 60.0)
    low, high = sorted(FAR)
    for rank, peer in (FAR, FAR[::-1]):
        job.planes[rank].open_session(peer)
    time.sleep(0.2)
    assert all(not job.planes[rank]._sessions[peer]._carriers for rank, peer in (FAR, FAR[::-1]))
    job.planes[high].send(low, Text("waits for the other end"))
    job.planes[low].send(high, Text("dials"))
    for rank, peer in (FAR, FAR[::-1]):
        job.seen[rank].wait_for(lambda r=rank, p=peer: job.seen[r].messages[-1:] != [])
        assert job.seen[rank].messages[0][0] == peer


def test_a_session_without_messages_is_connected_soon(start_job: Callable[..., Job]) -> None:
    job = start_job(NRANKS)
    job.wait_until_connected()
    for rank, peer in (FAR, FAR[::-1]):
        job.planes[rank].open_session(peer)
    for rank, peer in (FAR, FAR[::-1]):
        sessions = job.planes[rank]._sessions
        job.seen[rank].wait_for(lambda s=sessions, p=peer: p in s and s[p]._carriers != {})
