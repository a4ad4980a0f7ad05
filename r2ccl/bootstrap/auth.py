"""Mutual authentication with a shared secret on a new connection: both sides, without I/O.

The handshake has three messages of fixed size. Until the acceptor has verified the proof, it
interprets only the magic and the version in the dialer's bytes::

    dialer                                     acceptor
                                       <-      magic, version, nonce (40 B)
    magic, version, nonce,
    claim, HMAC("dial", ...) (116 B)   ->
                                       <-      HMAC("accept", ...) (32 B)

The acceptor sends first: its message arrives as soon as the connection is made, so a handshake
normally wakes each side only twice. Each HMAC-SHA256 covers a label, magic, version and nonce of
both sides, and the claim; the acceptor's also covers the dialer's proof. A proof is therefore valid
for one role, one pair of ranks and one connection: it can be neither replayed nor reflected. A
dialer may send its first bytes together with its proof, before the acceptor has proved anything;
the acceptor reads them only after verifying the proof.

The handshake authenticates the two ends of the connection. Later bytes are neither encrypted nor
authenticated: an attacker who can rewrite packets on the path is outside the fault model.

This module does no I/O; nonces are arguments. Invariant: no repr, error message or pickle of a
`Secret` contains its key.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple, NoReturn

from r2ccl.errors import InternalError, InvalidArgument, R2cclError

#: Version of the wire protocol: handshake, frames and rendezvous messages.
PROTOCOL_VERSION = 5

SECRET_NBYTES = 32
NONCE_NBYTES = 32
COMMUNICATOR_ID_NBYTES = 16

_MAGIC = b"r2ccl\r"
_OPENING = struct.Struct(f"!6sH{NONCE_NBYTES}s")
_CLAIM = struct.Struct(f"!B3xIIIQI{COMMUNICATOR_ID_NBYTES}s")
_MAC_NBYTES = 32
#: Block size of SHA-256 in bytes, and the values that HMAC combines with each byte of the key.
_BLOCK_NBYTES = 64
_INNER_PAD, _OUTER_PAD = 0x36, 0x5C
_DIAL_LABEL = b"r2ccl dial\0"
_ACCEPT_LABEL = b"r2ccl accept\0"

#: Sizes in bytes of the three messages, in the order sent. The second, the proof, begins with an
#: opening, too.
OPENING_NBYTES = _OPENING.size
PROOF_NBYTES = OPENING_NBYTES + _CLAIM.size + _MAC_NBYTES
ANSWER_NBYTES = _MAC_NBYTES


class HandshakeRejected(R2cclError):
    """Error: a handshake failed, or one side refused the connection.

    ``reason`` is a short, fixed text, by which rejections are counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Secret:
    """Secret of 32 bytes shared by all ranks of a job; hidden by ``repr`` and not picklable.

    Parameters
    ----------
    key : bytes
        32 bytes from a cryptographic random source.

    Raises
    ------
    InvalidArgument
        If `key` does not have 32 bytes.
    """

    __slots__ = ("_inner", "_key", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) != SECRET_NBYTES:
            raise InvalidArgument(
                f"a secret of {len(key)} bytes was given, {SECRET_NBYTES} are needed: "
                f"pass {SECRET_NBYTES} random bytes, or {2 * SECRET_NBYTES} hexadecimal digits to "
                "from_hex()"
            )
        self._key = key
        # The hash states after the key's blocks. `hmac.digest` takes 2 to 10 times as long, because
        # OpenSSL looks up both algorithms by name in each call; each connection needs two proofs.
        block = key.ljust(_BLOCK_NBYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ _INNER_PAD for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ _OUTER_PAD for byte in block))

    @classmethod
    def from_hex(cls, text: str, source: str = "the secret") -> Secret:
        """Return the secret given as 64 hexadecimal digits; white space around bytes is ignored.

        Parameters
        ----------
        text : str
        source : str
            Name of the variable or file that `text` is from, for the error message.

        Raises
        ------
        InvalidArgument
            If `text` is not 64 hexadecimal digits. The message does not contain `text`.
        """
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise InvalidArgument(
                f"{source}: the secret must have {2 * SECRET_NBYTES} hexadecimal digits: make one "
                "with `openssl rand -hex 32`"
            ) from None

    def hex(self) -> str:
        """Return the key as 64 hexadecimal digits.

        Store the digits only in an environment variable or a file of mode 0600.
        """
        return self._key.hex()

    def sign(self, message: bytes) -> bytes:
        """Return the HMAC-SHA256 (RFC 2104) of `message` with this secret as the key."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        """Raise `InternalError`: a pickle would expose the secret."""
        raise InternalError(
            "a secret must not be pickled; pass Secret.hex() to the process that needs it"
        )


class Purpose(enum.IntEnum):
    """Purpose of a connection, which its dialer claims."""

    CONTROL = 1
    DATA = 2
    RENDEZVOUS = 3
    #: Carries bytes that the acceptor forwards to another rank.
    FORWARD = 4
    #: Passes a segment of shared memory between ranks of one host.
    SEGMENT = 5


class Claim(NamedTuple):
    """Dialer's description of its connection, which can be trusted after `Acceptor.verify`.

    ``src`` and ``dst`` are the ranks of dialer and acceptor; for SEGMENT, their indices among the
    ranks that share the memory. ``rail`` and ``epoch`` identify the path of a DATA connection, and
    are 0 for other purposes. ``beyond`` is the rank to which a FORWARD connection is forwarded,
    else 0. ``communicator`` is the communicator's id of 16 bytes; all bytes are zero until the
    rendezvous has chosen the id.
    """

    purpose: Purpose
    communicator: bytes
    src: int
    dst: int
    rail: int = 0
    epoch: int = 0
    beyond: int = 0

    def pack(self) -> bytes:
        """Return the encoded claim, which has a fixed size."""
        return _CLAIM.pack(
            self.purpose, self.src, self.dst, self.rail, self.epoch, self.beyond, self.communicator
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Claim:
        """Return the claim that `pack` encoded; call it only after the proof was verified.

        Raises
        ------
        HandshakeRejected
            If the purpose is unknown.
        """
        purpose, src, dst, rail, epoch, beyond, communicator = _CLAIM.unpack(packed)
        try:
            known = Purpose(purpose)
        except ValueError:
            raise HandshakeRejected("unknown purpose") from None
        return cls(known, communicator, src, dst, rail, epoch, beyond)


class Dialer:
    """Connecting side of a handshake.

    Pass the acceptor's opening to `prove` and send the result; pass the acceptor's answer to
    `confirm`.

    Parameters
    ----------
    secret : Secret
    claim : Claim
    nonce : bytes
        32 fresh random bytes.

    Raises
    ------
    InternalError
        If `confirm` is called before `prove`, or `nonce` or an opening has the wrong length.
    """

    def __init__(self, secret: Secret, claim: Claim, nonce: bytes) -> None:
        self._secret = secret
        self._claim = claim.pack()
        self._opening = _pack_opening(nonce)
        self._expected_answer = b""

    def prove(self, opening: bytes) -> bytes:
        """Return this side's opening, claim and proof, to be sent in reply to `opening`.

        Raises
        ------
        HandshakeRejected
            If the acceptor's `opening` has a wrong magic or version.
        """
        _check_opening(opening)
        transcript = opening + self._opening + self._claim
        proof = self._secret.sign(_DIAL_LABEL + transcript)
        self._expected_answer = self._secret.sign(_ACCEPT_LABEL + transcript + proof)
        return self._opening + self._claim + proof

    def confirm(self, answer: bytes) -> None:
        """Check the acceptor's `answer`; the connection may be used if no error is raised.

        Raises
        ------
        HandshakeRejected
            If the acceptor does not know the secret.
        """
        if not self._expected_answer:
            raise InternalError("confirm() before prove()")
        if not hmac.compare_digest(answer, self._expected_answer):
            raise HandshakeRejected("wrong proof")


class Acceptor:
    """Listening side of a handshake.

    Send `opening`; pass the dialer's message to `verify`; send `answer` to accept the connection.

    Parameters
    ----------
    secret : Secret
    nonce : bytes
        32 fresh random bytes.

    Raises
    ------
    InternalError
        If `answer` is called before `verify`, or `nonce` has the wrong length.
    """

    def __init__(self, secret: Secret, nonce: bytes) -> None:
        self._secret = secret
        self._opening = _pack_opening(nonce)
        self._answer = b""

    def opening(self) -> bytes:
        """Return the first message of the handshake."""
        return self._opening

    def check(self, beginning: bytes) -> None:
        """Check the dialer's opening; do nothing while `beginning` is shorter than an opening.

        `beginning` is the part of the dialer's message that has arrived.

        Raises
        ------
        HandshakeRejected
            If the opening has a wrong magic or version.
        """
        if len(beginning) >= OPENING_NBYTES:
            _check_opening(beginning[:OPENING_NBYTES])

    def verify(self, message: bytes) -> Claim:
        """Check the opening and the proof in the dialer's message; return its claim.

        Raises
        ------
        HandshakeRejected
            If the opening has a wrong magic or version, the proof is wrong, or the claim has an
            unknown purpose.
        """
        self.check(message)
        signed, proof = message[:-_MAC_NBYTES], message[-_MAC_NBYTES:]
        transcript = self._opening + signed
        if not hmac.compare_digest(proof, self._secret.sign(_DIAL_LABEL + transcript)):
            raise HandshakeRejected("wrong proof")
        self._answer = self._secret.sign(_ACCEPT_LABEL + transcript + proof)
        return Claim.unpack(signed[OPENING_NBYTES:])

    def answer(self) -> bytes:
        """Return the last message, this side's proof; sending it accepts the connection."""
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
