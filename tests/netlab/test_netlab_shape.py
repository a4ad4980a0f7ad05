"""Text from which a lab is built; needs no namespaces."""

import re

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.testing.netlab import LabShape, fabric


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", 251),
        ("rails", 101),
        ("mtu", 100),
        ("ranks_per_node", 0),
        ("rate", "fast"),
        ("rate", "0mbit"),
        ("burst", "256"),
        ("latency", "10"),
        ("buffer", "20"),
        ("fabric", "ring"),
        ("nodes", "2"),
        ("rails", 2.5),
        ("rate", 5),
    ],
)
def test_a_shape_out_of_range_is_refused_with_what_is_allowed(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"{field}=.*allowed is"):
        LabShape(**{field: value})  # type: ignore[arg-type]


def test_no_two_interfaces_share_an_index_across_a_veth() -> None:
    shape = LabShape(nodes=fabric.MAX_NODES, rails=fabric.MAX_RAILS)
    lines = fabric.switch_lines(shape, [f"ns{node}" for node in range(shape.nodes)])
    in_switch, in_node = [], set()
    for line in lines:
        indexes = [int(index) for index in re.findall(r"\bindex (\d+)", line)]
        in_switch += indexes[:1]
        in_node.update(indexes[1:])
    assert len(in_switch) == len(set(in_switch))
    assert len(in_node) == shape.rails + 1
    assert not in_node & set(in_switch)


def test_names_fit_the_kernels_fifteen_bytes() -> None:
    last = LabShape(nodes=fabric.MAX_NODES, rails=fabric.MAX_RAILS)
    assert len(fabric.port_name(last.nodes - 1, last.rails - 1)) <= 15
    assert len(fabric.nic_name(last.rails - 1)) <= 15


@pytest.mark.parametrize(
    ("rate", "latency", "limit"),
    [
        ("200mbit", "10ms", 250_000),
        ("1.5gbit", "1ms", 187_500),
        ("800000kbit", "10ms", 1_000_000),
        ("10mbit", "10ms", 128 << 10),
        ("400mbit", "5000us", 250_000),
        ("1000000bit", "10s", 1_250_000),
    ],
)
def test_a_queue_holds_what_its_rate_sends_in_its_latency(
    rate: str, latency: str, limit: int
) -> None:
    shape = LabShape(rate=rate, latency=latency, buffer="1ms")
    assert fabric.nic_shaper(shape, 0).endswith(
        f"dev rail0 root tbf rate {rate} burst 256kb limit {limit}"
    )
    shape = LabShape(rate=rate, latency="1ms", buffer=latency)
    assert fabric.port_shaper(shape, 2, 0).endswith(f"burst 256kb limit {limit}")
