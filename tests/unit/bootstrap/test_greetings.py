"""The table of addresses that rank 0 sends: what comes out is what went in, and no more."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from r2ccl.bootstrap import greetings
from r2ccl.bootstrap.greetings import Table, decode, encode
from r2ccl.bootstrap.messages import PeerInfo
from r2ccl.errors import InvalidArgument


def peers(nranks: int) -> tuple[PeerInfo, ...]:
    return tuple(
        PeerInfo(
            rank,
            f"node{rank // 8}/boot/4026531840",
            1000 + rank,
            ((f"10.0.0.{rank}", 29500),),
            ((f"10.1.0.{rank}", 40000 + rank), (f"10.2.0.{rank}", 50000 + rank)),
        )
        for rank in range(nranks)
    )


def test_a_table_has_the_addresses_of_all_ranks():
    table = decode(encode(Table.of(peers(64))))
    assert isinstance(table, Table)
    assert table.peers() == peers(64)
    assert 3 * len(table.packed) < len(msgspec.msgpack.encode(peers(64)))


@pytest.mark.parametrize(
    "packed",
    [b"", b"no zlib", zlib.compress(b"no msgpack"), zlib.compress(msgspec.msgpack.encode([1, 2]))],
)
def test_a_table_that_cannot_be_decoded_is_refused(packed):
    with pytest.raises(InvalidArgument, match="same version"):
        Table(packed).peers()


def test_a_table_is_decompressed_up_to_its_largest_size(monkeypatch):
    monkeypatch.setattr(greetings, "_MAX_TABLE_NBYTES", 1000)
    with pytest.raises(InvalidArgument, match="same version"):
        Table.of(peers(64)).peers()
