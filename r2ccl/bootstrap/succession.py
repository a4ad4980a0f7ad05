"""Control plane of the surviving ranks after a shrink, made from the old control plane.

There is no rendezvous and no leader that could fail. Each rank opens the listeners of the next
communicator and sends their addresses, as a `PeerInfo`, over the old control plane. After the
survivors have agreed on the members, each makes the same table of addresses from these messages.
Each derives the new secret and communicator id from the old ones, the members and the number of the
attempt. Ranks with the old secret that are not members, or are still at an earlier attempt,
therefore do not authenticate by mistake. MPI is not used.

If the listener or the probe port of a rail cannot be opened, for example because this host has lost
the address, its port in the `PeerInfo` is 0. The members use the rails that all of them can open.
Invariant: every socket opened here is handed over or closed.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from r2ccl.bootstrap import wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, Secret
from r2ccl.bootstrap.control import ControlPlane
from r2ccl.bootstrap.loop import ControlLoop
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import TransportError

logger = logging.getLogger("r2ccl.bootstrap")

_SECRET_LABEL = b"r2ccl shrink secret\0"
_ID_LABEL = b"r2ccl shrink id\0"
_peer_info_decoder = msgspec.msgpack.Decoder(PeerInfo)
_STOP_S = 1.0


class Succession:
    """Listeners of this rank for the next communicator; owns them until `make` or `close`.

    Parameters
    ----------
    old : ControlPlane
        Control plane of the current communicator.
    excluded : sequence of int, optional
        Rails of this rank that the user has excluded; they stay excluded.

    Attributes
    ----------
    peer_info : bytes
        Encoded `PeerInfo` with the new addresses, to be sent to the other ranks.
    """

    def __init__(self, old: ControlPlane, excluded: Sequence[int] = ()) -> None:
        own = old.peers[old.rank]
        self._old = old
        self._rails = [_open(wire.listen, old.rank, nic.address) for nic in old.nics]
        self._probes = [_open(wire.reserve_port, old.rank, nic.address) for nic in old.nics]
        self._control = [_open(wire.listen, old.rank, host) for host, _ in own.control_addresses]
        info = msgspec.structs.replace(
            own,
            rails=tuple(
                _address(sock, nic.address) for sock, nic in zip(self._rails, old.nics, strict=True)
            ),
            probe_ports=tuple(_address(sock)[1] for sock in self._probes),
            control_addresses=tuple(_address(sock) for sock in self._control if sock is not None),
            failed_nics="",  # `excluded` has those that were not included again
            excluded=tuple(excluded),
        )
        self.peer_info = msgspec.msgpack.encode(info)

    def make(self, peer_infos: Mapping[int, bytes], attempt: int = 0) -> ControlPlane:
        """Return the control plane, not started, of the ranks in `peer_infos`, in their old order.

        Parameters
        ----------
        peer_infos : mapping of int to bytes
            Value of `Succession.peer_info` that each member sent, by its old rank; equal on all
            members. It must have an entry for this rank, whose value is not read.
        attempt : int
            Number of the attempt, from 0; equal on all members. A repeated attempt of the same
            members must have a higher number.

        Raises
        ------
        TransportError
            If the members have no rail whose sockets all of them could open.
        """
        old = self._old
        members = sorted(peer_infos)
        given = {**peer_infos, old.rank: self.peer_info}
        infos = [_peer_info_decoder.decode(given[member]) for member in members]
        rails = self._common_rails(members, infos)
        secret, communicator_id = derive(old.setting.secret, old.communicator_id, members, attempt)
        rank = members.index(old.rank)
        loop = ControlLoop(f"r2ccl-control-{rank}")  # if it fails, `close` closes the sockets
        listeners, probes = self._hand_over(rails)
        try:
            return ControlPlane(
                loop=loop,
                config=old.setting.config,
                secret=secret,
                communicator_id=communicator_id,
                rank=rank,
                peers=tuple(_renumbered(info, new, rails) for new, info in enumerate(infos)),
                nics=tuple(old.nics[rail] for rail in rails),
                listeners=listeners,
                probe_sockets=probes,
                codec=old.setting.codec,
            )
        except BaseException:
            loop.close(_STOP_S)
            for sock in (*listeners, *probes):
                sock.close()
            raise

    def close(self) -> None:
        """Close the sockets that `make` did not hand over. Idempotent."""
        for sock in (*self._rails, *self._control, *self._probes):
            if sock is not None:
                sock.close()
        self._rails, self._control, self._probes = [], [], []

    def _common_rails(self, members: Sequence[int], infos: Sequence[PeerInfo]) -> list[int]:
        rails = range(len(self._old.nics))
        common = [
            rail
            for rail in rails
            if all(info.rails[rail][1] and info.probe_ports[rail] for info in infos)
        ]
        if not common:
            raise TransportError(
                f"rank {self._old.rank}: ranks {members} have no rail that all could reopen: "
                "check that their interfaces still have their addresses",
                rank=self._old.rank,
            )
        return common

    def _hand_over(self, rails: Sequence[int]) -> tuple[list[socket.socket], list[socket.socket]]:
        """Return the listeners and the probe sockets of `rails`; close those of other rails.

        The listeners at the control addresses follow those of the rails.
        """
        taken = [sock for rail in rails if (sock := self._rails[rail]) is not None]
        taken += [sock for sock in self._control if sock is not None]
        probes = [sock for rail in rails if (sock := self._probes[rail]) is not None]
        self._rails = [sock for rail, sock in enumerate(self._rails) if rail not in rails]
        self._probes = [sock for rail, sock in enumerate(self._probes) if rail not in rails]
        self._control = []
        self.close()
        return taken, probes


def derive(
    secret: Secret, communicator_id: bytes, members: Sequence[int], attempt: int = 0
) -> tuple[Secret, bytes]:
    """Return the secret and id of the next communicator, which has the ranks `members`.

    `attempt` distinguishes repeated attempts of the same members. Both results are HMACs with the
    old secret as key, so neither reveals the old secret or the other result.
    """
    who = communicator_id + struct.pack(f"!I{len(members)}I", attempt, *members)
    identity = secret.sign(_ID_LABEL + who)[:COMMUNICATOR_ID_NBYTES]
    return Secret(secret.sign(_SECRET_LABEL + who)), identity


def _renumbered(info: PeerInfo, rank: int, rails: Sequence[int]) -> PeerInfo:
    nhomes = len(info.rails) - info.nlast_resorts
    kept = (*rails, *range(len(info.rails), len(info.nics)))
    return msgspec.structs.replace(
        info,
        rank=rank,
        rails=tuple(info.rails[rail] for rail in rails),
        probe_ports=tuple(info.probe_ports[rail] for rail in rails),
        nlast_resorts=sum(rail >= nhomes for rail in rails),
        interfaces=tuple(info.interfaces[rail] for rail in rails),
        excluded=tuple(new for new, rail in enumerate(kept) if rail in info.excluded),
    )


def _open(make: Callable[[str], socket.socket], rank: int, host: str) -> socket.socket | None:
    try:
        return make(host)
    except OSError as exc:
        logger.warning(
            "rank %d: cannot open a socket at %s (%s); shrink() continues without this address and "
            "without a rail that needs it",
            rank, host, exc.strerror,
        )  # fmt: skip
        return None


def _address(sock: socket.socket | None, host: str = "") -> wire.Address:
    return (host, 0) if sock is None else wire.address_of(sock)


__all__ = ["Succession", "derive"]
