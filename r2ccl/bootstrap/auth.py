"""Mutual proof of a shared secret on a fresh connection: both sides as sans-I/O objects.

Four fixed-size messages, so that nothing a stranger sends is ever parsed::

    dialer                                   acceptor
    magic, version, nonce (40 B)     ->
                                     <-      magic, version, nonce (40 B)
    claim, HMAC("dial", ...) (76 B)  ->
                                     <-      HMAC("accept", ...) (32 B)

Each HMAC-SHA256 covers its own label, both first messages and the claim; the acceptor's covers
the dialer's proof too. So a proof is good for one role, one pair of ranks and one connection: it
can be neither replayed nor reflected. The acceptor looks into the claim only after its proof.

What is proved is who opened the connection. The bytes after it are neither encrypted nor
authenticated: someone who can rewrite packets on the path is outside the fault model.

This module does no I/O, reads no clock and draws no random number (nonces are passed in); it
imports nothing but ``errors``. Invariant: a secret never shows in a repr, a message or a pickle.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import NamedTuple, NoReturn

from r2ccl.errors import InternalError, InvalidArgument, R2cclError

#: Version of everything on r2ccl's connections: handshake, frames, rendezvous.
PROTOCOL_VERSION = 2

SECRET_NBYTES = 32
NONCE_NBYTES = 32
COMMUNICATOR_ID_NBYTES = 16

_MAGIC = b"r2ccl\r"
_OPENING = struct.Struct(f"!6sH{NONCE_NBYTES}s")
_CLAIM = struct.Struct(f"!B3xIIIQI{COMMUNICATOR_ID_NBYTES}s")
_MAC_NBYTES = 32
_DIAL_LABEL = b"r2ccl dial\0"
_ACCEPT_LABEL = b"r2ccl accept\0"

#: Sizes of the four messages, in the order they travel (the first two are equal).
OPENING_NBYTES = _OPENING.size
PROOF_NBYTES = _CLAIM.size + _MAC_NBYTES
ANSWER_NBYTES = _MAC_NBYTES


class HandshakeRejected(R2cclError):
    """The other side is not who it should be; `reason` is short, fixed text fit for a counter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Secret:
    """The 32 bytes all ranks of a job share. Prints as dots; refuses to be pickled.

    Parameters
    ----------
    key : bytes
        32 bytes from a cryptographic random source.

    Raises
    ------
    InvalidArgument
        `key` has another length.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_NBYTES:
            raise InvalidArgument(
                f"a secret of {len(key)} bytes was given, {SECRET_NBYTES} are needed: "
                "make one with `openssl rand -hex 32`"
            )
        self._key = key

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """Read 64 hexadecimal digits; white space around them is ignored.

        Raises
        ------
        InvalidArgument
            Anything else. The message does not repeat what was given.
        """
        try:
            return cls(bytes.fromhex(text.strip()))
        except ValueError:
            raise InvalidArgument(
                f"the secret is not {2 * SECRET_NBYTES} hexadecimal digits: "
                "make one with `openssl rand -hex 32`"
            ) from None

    def hex(self) -> str:
        """Return the secret itself, for the environment or the 0600 file it travels in."""
        return self._key.hex()

    def sign(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 (RFC 2104) of `message`."""
        return hmac.digest(self._key, message, "sha256")

    def __repr__(self) -> str:
        """Tell nothing."""
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        """Refuse."""
        raise InternalError("a secret must not be pickled; pass Secret.hex() where it has to go")


class Purpose(enum.IntEnum):
    """What a connection is for."""

    CONTROL = 1
    DATA = 2
    RENDEZVOUS = 3
    #: Bytes for another rank, to be forwarded.
    FORWARD = 4


class Claim(NamedTuple):
    """What the dialer says the connection is; true once its proof is verified.

    ``rail`` and ``epoch`` name the path of a DATA connection, ``beyond`` is the rank a FORWARD
    connection is for; they are 0 otherwise. ``communicator`` is 16 bytes, zeros before rendezvous
    has drawn them.
    """

    purpose: Purpose
    communicator: bytes
    src: int
    dst: int
    rail: int = 0
    epoch: int = 0
    beyond: int = 0

    def pack(self) -> bytes:
        """Return the fixed-size wire form."""
        return _CLAIM.pack(
            self.purpose, self.src, self.dst, self.rail, self.epoch, self.beyond, self.communicator
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Claim:
        """Invert `pack`. Only for bytes whose proof was verified.

        Raises
        ------
        HandshakeRejected
            The purpose is unknown.
        """
        purpose, src, dst, rail, epoch, beyond, communicator = _CLAIM.unpack(packed)
        try:
            known = Purpose(purpose)
        except ValueError:
            raise HandshakeRejected("unknown purpose") from None
        return cls(known, communicator, src, dst, rail, epoch, beyond)


class Dialer:
    """The side that connects: send `opening`, feed `prove`, send its result, feed `confirm`.

    Parameters
    ----------
    secret : Secret
    claim : Claim
    nonce : bytes
        32 fresh random bytes.
    """

    def __init__(self, secret: Secret, claim: Claim, nonce: bytes) -> None:
        self._secret = secret
        self._claim = claim.pack()
        self._opening = _pack_opening(nonce)
        self._expected_answer = b""

    def opening(self) -> bytes:
        """Return the first message."""
        return self._opening

    def prove(self, opening: bytes) -> bytes:
        """Answer the acceptor's opening with the claim and its proof.

        Raises
        ------
        HandshakeRejected
            Wrong magic or version.
        """
        _check_opening(opening)
        transcript = self._opening + opening + self._claim
        proof = self._secret.sign(_DIAL_LABEL + transcript)
        self._expected_answer = self._secret.sign(_ACCEPT_LABEL + transcript + proof)
        return self._claim + proof

    def confirm(self, answer: bytes) -> None:
        """Check the acceptor's proof; the connection may be used after that.

        Raises
        ------
        HandshakeRejected
            The acceptor does not know the secret.
        """
        if not self._expected_answer:
            raise InternalError("confirm() before prove()")
        if not hmac.compare_digest(answer, self._expected_answer):
            raise HandshakeRejected("wrong proof")


class Acceptor:
    """The side that listens: feed `challenge`, send its result, feed `verify`, send `answer`.

    Parameters
    ----------
    secret : Secret
    nonce : bytes
        32 fresh random bytes.
    """

    def __init__(self, secret: Secret, nonce: bytes) -> None:
        self._secret = secret
        self._opening = _pack_opening(nonce)
        self._transcript = b""
        self._answer = b""

    def challenge(self, opening: bytes) -> bytes:
        """Answer the dialer's opening with this side's.

        Raises
        ------
        HandshakeRejected
            Wrong magic or version.
        """
        _check_opening(opening)
        self._transcript = opening + self._opening
        return self._opening

    def verify(self, message: bytes) -> Claim:
        """Check the dialer's proof and only then read its claim.

        Raises
        ------
        HandshakeRejected
            The proof is wrong, or the claim names an unknown purpose.
        """
        if not self._transcript:
            raise InternalError("verify() before challenge()")
        claim, proof = message[: _CLAIM.size], message[_CLAIM.size :]
        transcript = self._transcript + claim
        if not hmac.compare_digest(proof, self._secret.sign(_DIAL_LABEL + transcript)):
            raise HandshakeRejected("wrong proof")
        self._answer = self._secret.sign(_ACCEPT_LABEL + transcript + proof)
        return Claim.unpack(claim)

    def answer(self) -> bytes:
        """Return the last message: this side's proof, which also says that the claim is welcome."""
        if not self._answer:
            raise InternalError("answer() before verify()")
        return self._answer


def _pack_opening(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_NBYTES:
        raise InternalError(f"a nonce has {NONCE_NBYTES} bytes, not {len(nonce)}")
    return _OPENING.pack(_MAGIC, PROTOCOL_VERSION, nonce)


def _check_opening(opening: bytes) -> None:
    if len(opening) != OPENING_NBYTES:
        raise InternalError(f"an opening has {OPENING_NBYTES} bytes, not {len(opening)}")
    magic, version, _ = _OPENING.unpack(opening)
    if magic != _MAGIC:
        raise HandshakeRejected("wrong magic")
    if version != PROTOCOL_VERSION:
        raise HandshakeRejected("wrong version")


__all__ = [
    "ANSWER_NBYTES",
    "COMMUNICATOR_ID_NBYTES",
    "NONCE_NBYTES",
    "OPENING_NBYTES",
    "PROOF_NBYTES",
    "PROTOCOL_VERSION",
    "SECRET_NBYTES",
    "Acceptor",
    "Claim",
    "Dialer",
    "HandshakeRejected",
    "Purpose",
    "Secret",
]
