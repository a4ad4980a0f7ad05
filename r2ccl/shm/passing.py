"""Exchange of segments between the ranks of one host, over Unix sockets.

Each rank listens at a random name in the abstract namespace, which leaves no file behind, and each
pair of ranks connects once: the higher rank connects to the lower one. Ranks in different network
namespaces cannot reach each other. If two ranks are in different PID namespaces, or belong to
different users, at least one of them refuses the other. The attempt to connect therefore shows
whether two ranks are in the same container. Both ends prove that they know the secret of the job
(`r2ccl.bootstrap.auth`) before they pass the descriptors of their segments.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from r2ccl.bootstrap.auth import (
    ANSWER_NBYTES,
    NONCE_NBYTES,
    OPENING_NBYTES,
    PROOF_NBYTES,
    Acceptor,
    Claim,
    Dialer,
    HandshakeRejected,
    Purpose,
    Secret,
)
from r2ccl.clock import monotonic
from r2ccl.errors import TransportError, describe_os_error, errno_name
from r2ccl.shm.segment import Segment
from r2ccl.types import AllgatherBytes, pack_text, unpack_text

LISTENER_NAME_NBYTES = 16
#: Size in bytes of each rank's result in `pass_segments`.
RESULT_NBYTES = 240
_CREDENTIALS = struct.Struct("iII")
#: Time limit in seconds of connecting and of each send and, on an accepted connection, of all waits
#: for data together, because any process may connect.
_HANDSHAKE_S = 5.0
#: Interval in seconds at which a wait checks whether the communicator has ended.
_LOOK_S = 0.02


class Place(msgspec.Struct, frozen=True):
    """Position of this rank among the ranks of its host.

    ``ranks`` has the numbers of these ranks in the job; error messages name these numbers.
    ``index`` is the index of this rank in ``ranks``. ``communicator`` is the
    `ControlPlane.communicator_id`.
    """

    ranks: Sequence[int]
    index: int
    communicator: bytes


class Deadline(NamedTuple):
    """Limit of the waits for other ranks: a time, or the end of the communicator.

    Attributes
    ----------
    until_s : float
        Time at which the waits end, on the clock of the library.
    has_ended : callable
        ``has_ended()`` returns True if the communicator has ended; other ranks may then never
        answer.
    """

    until_s: float
    has_ended: Callable[[], bool]

    def until_readable(self, sock: socket.socket) -> None:
        """Wait until `sock` has data or a connection, or its peer has closed it.

        Raises
        ------
        OSError
            If the time limit has passed (TimeoutError), or the communicator has ended.
        """
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(1000 * _LOOK_S):
            if self.has_ended():
                raise OSError(errno.ECANCELED, "the communicator has ended")
            if monotonic() >= self.until_s:
                raise OSError(errno.ETIMEDOUT, "another rank did not answer in time")

    def within(self, timeout_s: float) -> Deadline:
        """Return a copy of this limit whose waits end after `timeout_s` seconds at the latest."""
        return self._replace(until_s=min(self.until_s, monotonic() + timeout_s))


class SegmentListener:
    """Unix socket at which the higher ranks of the host connect to this rank.

    Two descriptors are reserved for `pass_segments`: one for a connection, one for the segment of a
    peer. A lack of descriptors is thus found before other ranks wait for this rank.

    Parameters
    ----------
    nranks : int
        Number of ranks on the host.

    Attributes
    ----------
    name : bytes
        Name of the socket, `LISTENER_NAME_NBYTES` long, which the other ranks need.
    problem : str
        Reason why the socket cannot be used; empty if it can.
    status : str
        Name of the error number behind `problem`, for example EMFILE; empty if there is none.
    """

    def __init__(self, nranks: int) -> None:
        self.name = secrets.token_bytes(LISTENER_NAME_NBYTES)
        self.problem = self.status = ""
        self._socket: socket.socket | None = None
        self._reserved: list[int] = []
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._socket.bind(_abstract(self.name))
            self._socket.listen(nranks)
            for _ in range(2):
                self._reserved.append(os.dup(self._socket.fileno()))
        except OSError as exc:
            self.problem, self.status = describe_os_error(exc), errno_name(exc)

    def free_reserved(self) -> None:
        """Close the reserved descriptors, so that other descriptors can be opened. Idempotent."""
        while self._reserved:
            os.close(self._reserved.pop())

    def accept(self, deadline: Deadline) -> socket.socket:
        """Return the next connection.

        Raises
        ------
        OSError
            As `Deadline.until_readable`, or if the connection cannot be accepted, for example
            because no descriptor is free.
        """
        assert self._socket is not None, "the socket cannot be used"
        deadline.until_readable(self._socket)
        return self._socket.accept()[0]

    def close(self) -> None:
        """Close the socket and the reserved descriptors. Idempotent."""
        self.free_reserved()
        if self._socket is not None:
            self._socket.close()


def pass_segments(
    own: Segment,
    place: Place,
    listener: SegmentListener,
    names: Sequence[bytes],
    exchange: AllgatherBytes,
    secret: Secret,
    timeout_s: float,
    has_ended: Callable[[], bool],
) -> dict[int, Segment]:
    """Pass this rank's segment to all other ranks of the host, and map the segments of these ranks.

    Parameters
    ----------
    own : Segment
        This rank's segment, of the same size on all ranks; its descriptor stays open.
    place : Place
    listener : SegmentListener
        Listener of this rank; the caller closes it.
    names : sequence of bytes
        Name of each rank's listener, by index in ``place.ranks``.
    exchange : callable
        Allgathers bytes between the ranks of `place`; see `AllgatherBytes`. Called once, with
        `RESULT_NBYTES` bytes.
    secret : Secret
    timeout_s : float
        Seconds to wait for each lower rank and, counted from the call of this function, for all
        higher ranks together.
    has_ended : callable
        ``has_ended()`` returns True if the communicator has ended; this rank then stops waiting.

    Returns
    -------
    dict of int to Segment
        Segments of the other ranks, by index in ``place.ranks``. The caller closes them.

    Raises
    ------
    TransportError
        On every rank, if any two ranks cannot share memory.
    R2cclError
        If `exchange` raises it.

    Notes
    -----
    *Collective*: all ranks of `place`.
    """
    found: dict[int, Segment] = {}
    failed: list[TransportError] = []

    def take(index: int, descriptor: int) -> None:
        """Map a peer's segment; store an error, to be raised when no rank waits for this rank."""
        try:
            found[index] = own.of_peer(descriptor)
            found[index].close_descriptor()
        except TransportError as exc:
            failed.append(exc)

    problem = listener.problem
    listener.free_reserved()  # for the connections and segments below
    if not problem:
        whole = Deadline(monotonic() + timeout_s, has_ended)
        try:
            for index in range(place.index):
                each = Deadline(monotonic() + timeout_s, has_ended)
                take(index, _dial(names[index], index, own, place, secret, each))
            _accept_all(listener, take, own, place, secret, whole)
            if failed:
                raise failed[0]
        except (OSError, HandshakeRejected, TransportError) as exc:
            problem = describe_os_error(exc)
    if problem:
        problem = f"rank {place.ranks[place.index]}: {problem}"
    problems = list(map(unpack_text, exchange(pack_text(problem, RESULT_NBYTES))))
    if any(problems):
        for peer in found.values():
            peer.close()
        raise TransportError(
            f"ranks {list(place.ranks)} cannot share memory ({next(filter(None, problems))}); if "
            "they run as different users or in different network or PID namespaces, run them as "
            "one user in one container"
        )
    return found


def _dial(
    name: bytes, index: int, own: Segment, place: Place, secret: Secret, deadline: Deadline
) -> int:
    claim = Claim(Purpose.SEGMENT, place.communicator, place.index, index)
    dialer = Dialer(secret, claim, secrets.token_bytes(NONCE_NBYTES))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_HANDSHAKE_S)
        connection.connect(_abstract(name))
        _check_process(connection)
        proof = dialer.prove(_receive(connection, OPENING_NBYTES, deadline))
        connection.sendall(proof, socket.MSG_NOSIGNAL)
        dialer.confirm(_receive(connection, ANSWER_NBYTES, deadline))
        return _swap(connection, own, deadline)


def _accept_all(
    listener: SegmentListener,
    take: Callable[[int, int], None],
    own: Segment,
    place: Place,
    secret: Secret,
    deadline: Deadline,
) -> None:
    """Accept the connections of all higher ranks.

    ``take(index, descriptor)`` takes the segment of a rank. Connections of other processes, and
    those whose handshake fails, are closed.
    """
    missing = set(range(place.index + 1, len(place.ranks)))
    while missing:
        with listener.accept(deadline) as connection:
            connection.settimeout(_HANDSHAKE_S)
            each = deadline.within(_HANDSHAKE_S)
            try:
                _check_process(connection)
                acceptor = Acceptor(secret, secrets.token_bytes(NONCE_NBYTES))
                connection.sendall(acceptor.opening(), socket.MSG_NOSIGNAL)
                claim = acceptor.verify(_receive(connection, PROOF_NBYTES, each))
                wanted = Claim(Purpose.SEGMENT, place.communicator, claim.src, place.index)
                if claim != wanted or claim.src not in missing:
                    continue
                connection.sendall(acceptor.answer(), socket.MSG_NOSIGNAL)
                take(claim.src, _swap(connection, own, each))
                missing.discard(claim.src)
            except (HandshakeRejected, OSError):
                continue


def _swap(connection: socket.socket, own: Segment, deadline: Deadline) -> int:
    """Pass this rank's segment to a peer; return the descriptor of the peer's segment."""
    # Not `socket.send_fds`, which ignores its flags.
    passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [own.descriptor]))
    connection.sendmsg([b"s"], [passed], socket.MSG_NOSIGNAL)
    deadline.until_readable(connection)
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if message != b"s" or len(descriptors) != 1:
        for each in descriptors:
            os.close(each)
        raise HandshakeRejected("a peer passed no descriptor")
    return int(descriptors[0])


def _check_process(connection: socket.socket) -> None:
    """Raise HandshakeRejected if another user runs the peer, or its process is not visible here.

    A process of another PID namespace is visible only if its namespace is a descendant of the
    namespace of this process.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    if uid != os.geteuid():
        raise HandshakeRejected(f"a peer runs as user {uid}, not as user {os.geteuid()}")
    if pid == 0:
        raise HandshakeRejected("a peer runs in another PID namespace")


def _receive(connection: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    received = b""
    while len(received) < nbytes:
        deadline.until_readable(connection)
        some = connection.recv(nbytes - len(received))
        if not some:
            raise HandshakeRejected("a peer closed the connection")
        received += some
    return received


def _abstract(name: bytes) -> bytes:
    return b"\0r2ccl-" + name.hex().encode()


__all__ = ["LISTENER_NAME_NBYTES", "RESULT_NBYTES", "Place", "SegmentListener", "pass_segments"]
