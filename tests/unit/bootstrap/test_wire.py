"""Dials that fail, and what is reported about them."""

from __future__ import annotations

import asyncio

import pytest

from r2ccl.bootstrap import wire
from r2ccl.bootstrap.auth import COMMUNICATOR_ID_NBYTES, SECRET_NBYTES, Claim, Purpose, Secret


def test_a_listener_that_never_answers_is_told_from_no_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.6)
    claim = Claim(Purpose.CONTROL, bytes(COMMUNICATOR_ID_NBYTES), 0, 1)
    with wire.listen("127.0.0.1") as listener:
        target = listener.getsockname()[:2]
        with pytest.raises(TimeoutError) as caught:
            asyncio.run(wire.dial(Secret(bytes(SECRET_NBYTES)), claim, target, timeout_s=0.5))
    why, advice = wire.explain_failure(caught.value, target, 0.5)
    assert why.endswith("accepted the connection but did not authenticate it within 0.6 s")
    assert "hangs" in advice

    why, advice = wire.explain_failure(TimeoutError(), target, 0.5)
    assert (why[-27:], advice) == ("did not answer within 0.5 s", "check filters and routes")
