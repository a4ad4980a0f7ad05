"""Only who knows the secret gets in, in one role, for one pair of ranks, on one connection."""

from __future__ import annotations

import hmac
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r2ccl.bootstrap.auth import (
    ANSWER_NBYTES,
    OPENING_NBYTES,
    PROOF_NBYTES,
    Acceptor,
    Claim,
    Dialer,
    HandshakeRejected,
    Purpose,
    Secret,
)
from r2ccl.errors import InternalError, InvalidArgument

SECRET = Secret(bytes(range(32)))
CLAIM = Claim(Purpose.DATA, b"c" * 16, src=1, dst=2, rail=3, epoch=2**64 - 1)


def dialer(nonce: bytes = b"d" * 32, secret: Secret = SECRET, claim: Claim = CLAIM) -> Dialer:
    return Dialer(secret, claim, nonce)


def acceptor(nonce: bytes = b"a" * 32, secret: Secret = SECRET) -> Acceptor:
    return Acceptor(secret, nonce)


@given(key=st.binary(min_size=32, max_size=32), message=st.binary(max_size=200))
def test_a_signature_is_the_hmac_of_the_message(key: bytes, message: bytes) -> None:
    secret = Secret(key)
    expected = hmac.digest(key, message, "sha256")
    assert [secret.sign(message), secret.sign(message)] == [expected, expected]


def test_both_sides_with_the_secret_agree() -> None:
    left, right = dialer(), acceptor()
    proof = left.prove(right.opening())
    assert right.verify(proof) == CLAIM
    left.confirm(right.answer())


def test_every_message_has_its_fixed_size() -> None:
    left, right = dialer(), acceptor()
    assert len(right.opening()) == OPENING_NBYTES
    proof = left.prove(right.opening())
    right.verify(proof)
    assert (len(proof), len(right.answer())) == (PROOF_NBYTES, ANSWER_NBYTES)


def test_a_dialer_without_the_secret_is_rejected() -> None:
    left, right = dialer(secret=Secret(b"x" * 32)), acceptor()
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        right.verify(left.prove(right.opening()))


def test_an_acceptor_without_the_secret_is_rejected() -> None:
    left, right = dialer(), acceptor()
    left.prove(right.opening())
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        left.confirm(b"\0" * ANSWER_NBYTES)


@given(st.integers(0, PROOF_NBYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_the_proof_is_rejected(position: int, change: int) -> None:
    left, right = dialer(), acceptor()
    proof = bytearray(left.prove(right.opening()))
    proof[position] ^= change
    reason = "wrong magic" if position < 6 else "wrong version" if position < 8 else "wrong proof"
    with pytest.raises(HandshakeRejected, match=reason):
        right.verify(bytes(proof))


@given(st.integers(8, OPENING_NBYTES - 1), st.integers(1, 255))
def test_a_nonce_changed_under_way_is_noticed(position: int, change: int) -> None:
    left, right = dialer(), acceptor()
    seen = bytearray(right.opening())
    seen[position] ^= change
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        right.verify(left.prove(bytes(seen)))


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    left, first, second = dialer(), acceptor(b"1" * 32), acceptor(b"2" * 32)
    proof = left.prove(first.opening())
    first.verify(proof)
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        second.verify(proof)


def test_a_dialer_cannot_be_answered_with_its_own_words() -> None:
    left = dialer()
    own = left.prove(acceptor().opening())[:OPENING_NBYTES]
    proof = left.prove(own)  # its opening, reflected
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        left.confirm(proof[-ANSWER_NBYTES:])


def test_an_acceptors_answer_is_no_dialers_proof() -> None:
    left, right, other = dialer(), acceptor(), acceptor()
    proof = left.prove(right.opening())
    right.verify(proof)
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        other.verify(proof[:-ANSWER_NBYTES] + right.answer())


@pytest.mark.parametrize(
    ("opening", "reason"),
    [
        (b"\0" * OPENING_NBYTES, "wrong magic"),
        (b"r2ccl\r" + b"\0\0" + b"n" * 32, "wrong version"),
        (b"r2ccl\r" + b"\xff\xff" + b"n" * 32, "wrong version"),
    ],
)
def test_strange_openings_are_rejected_on_both_sides(opening: bytes, reason: str) -> None:
    with pytest.raises(HandshakeRejected, match=reason):
        acceptor().verify(opening.ljust(PROOF_NBYTES))
    with pytest.raises(HandshakeRejected, match=reason):
        acceptor().check(opening)
    with pytest.raises(HandshakeRejected, match=reason):
        dialer().prove(opening)


def test_an_unknown_purpose_is_rejected_only_after_its_proof() -> None:
    strange = CLAIM._replace(purpose=9)  # type: ignore[arg-type]
    left, right = dialer(claim=strange), acceptor()
    with pytest.raises(HandshakeRejected, match="unknown purpose"):
        right.verify(left.prove(right.opening()))
    left, right = dialer(claim=strange, secret=Secret(b"x" * 32)), acceptor()
    with pytest.raises(HandshakeRejected, match="wrong proof"):
        right.verify(left.prove(right.opening()))


def test_no_answer_leaves_before_the_proof() -> None:
    with pytest.raises(InternalError):
        acceptor().answer()


def test_a_secret_does_not_show() -> None:
    shown = f"{SECRET!r} {SECRET!s} {[SECRET]} {vars(type(SECRET)).keys()}"
    assert SECRET.hex() not in shown
    assert "0001" not in shown
    with pytest.raises(InternalError):
        pickle.dumps(SECRET)


@pytest.mark.parametrize("text", ["", "00" * 31, "00" * 33, "zz" * 32])
def test_a_bad_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^R2CC_SECRET: .*openssl rand -hex 32") as caught:
        Secret.from_hex(text, "R2CC_SECRET")
    assert not text or text not in str(caught.value)


def test_hexadecimal_form_is_inverted() -> None:
    assert Secret.from_hex(f" {SECRET.hex()}\n").hex() == SECRET.hex()
