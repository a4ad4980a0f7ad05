"""Messages that do not fit in one frame."""

from __future__ import annotations

import msgspec
import pytest

from r2ccl.bootstrap.messages import MAX_MESSAGE_NBYTES, Codec, Flooded, Routed
from r2ccl.bootstrap.session import MAX_BODY_NBYTES
from r2ccl.errors import InvalidArgument


class Bulk(msgspec.Struct, tag="bulk"):
    data: bytes


def test_the_longest_message_fits_what_is_put_around_it() -> None:
    codec = Codec(Bulk)
    spare = MAX_MESSAGE_NBYTES - len(codec.encode(Bulk(bytes(1 << 17)))) + (1 << 17)
    body = codec.encode(Bulk(bytes(spare)))
    assert len(body) == MAX_MESSAGE_NBYTES
    most = (1 << 63) - 1
    for around in (Flooded(most, most, body), Routed(most, most, most, body)):
        assert len(codec.encode(around)) <= MAX_BODY_NBYTES

    with pytest.raises(InvalidArgument, match=f"Bulk has .* bytes; at most {MAX_MESSAGE_NBYTES}"):
        codec.encode(Bulk(bytes(spare + 1)))
