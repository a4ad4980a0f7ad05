"""The reason of a revocation, as it is sent."""

from __future__ import annotations

from r2ccl.bootstrap.messages import Codec
from r2ccl.failover.revocation import Revoke


def test_a_reason_of_any_length_can_be_sent() -> None:
    codec = Codec(Revoke)
    sent = Revoke("CommunicatorRevoked", "because " * 1_000_000, 0)
    assert sent.text.startswith("because because")
    assert sent.text.endswith("…")
    assert codec.decode(codec.encode(sent)) == sent
    assert Revoke("CommunicatorRevoked", "because", 0).text == "because"
