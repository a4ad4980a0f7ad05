"""Networks of the simulator: the usual ones are short to write, the impossible ones are refused."""

from __future__ import annotations

import doctest
import math

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim import Change, Network, network, simulation

WHOLE = Network.uniform(3, 2, 10.0)


def test_uniform_ports_are_symmetric_and_nodes_have_their_ranks() -> None:
    pairs = Network.uniform(2, 3, 10.0, ranks_per_node=2)
    assert pairs.egress == pairs.ingress == ((10.0,) * 3,) * 2
    assert pairs.nodes == (0, 0, 1, 1)
    assert (pairs.nnodes, pairs.nrails, pairs.nranks) == (2, 3, 4)


def test_a_rail_is_taken_from_one_node_alone_both_ways() -> None:
    broken = WHOLE.without(1, 0)
    assert broken.egress == broken.ingress == ((10.0, 10.0), (0.0, 10.0), (10.0, 10.0))
    assert WHOLE.without(1, 0, 1).egress[1] == (0.0, 0.0)


def test_a_degraded_node_keeps_a_fraction_of_every_rail() -> None:
    assert WHOLE.degraded(2, 0.25).ingress == ((10.0, 10.0), (10.0, 10.0), (2.5, 2.5))


def test_ports_keep_their_own_speed_each_way() -> None:
    lopsided = Network(egress=((8.0,), (4.0,)), ingress=((2.0,), (6.0,)))
    assert lopsided.degraded(0, 0.5).egress == ((4.0,), (4.0,))
    assert lopsided.degraded(0, 0.5).ingress == ((1.0,), (6.0,))


def test_changes_come_in_the_order_of_their_times() -> None:
    later = WHOLE.without(1, 0, time_s=2.0).changed(Change(1.0, 0, 1, 5.0))
    assert later.changes == (Change(1.0, 0, 1, 5.0), Change(2.0, 1, 0, 0.0))
    assert later.egress == WHOLE.egress


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Network(egress=()), "one row per node"),
        (lambda: Network(egress=((),)), "one row per node"),
        (lambda: Network(egress=((1.0,), (1.0, 2.0))), "of the same length"),
        (lambda: Network(egress=((1.0,),), ingress=((1.0, 1.0),)), "of the same length"),
        (lambda: Network.uniform(2, 1, -1.0), "bandwidth=-1.0"),
        (lambda: Network.uniform(2, 1, math.inf), "bandwidth=inf"),
        (lambda: Network.uniform(2, 1, math.nan), "bandwidth=nan"),
        (lambda: Network.uniform(2, 1, 1.0, alpha_s=-1.0), "alpha_s=-1.0"),
        (lambda: Network.uniform(2, 1, 1.0, inside_alpha_s=math.nan), "alpha_s=nan"),
        (lambda: Network.uniform(2, 1, 1.0, reduction_rate=math.inf), "reduction_rate=inf"),
        (lambda: Network.uniform(2, 1, 1.0, inside_bandwidth=0.0), "inside_bandwidth=0.0"),
        (lambda: Network.uniform(2, 1, 1.0, ranks_per_node=0), "ranks_per_node=0"),
        (lambda: Network(egress=((1.0,),), nodes=(0, 1)), "0 to 0 for every rank"),
        (lambda: WHOLE.without(3, 0), r"\(3, 0\).* nodes 0 to 2 with rails 0 to 1"),
        (lambda: WHOLE.without(0, 2), r"\(0, 2\)"),
        (lambda: WHOLE.without(0, 2, time_s=1.0), r"\(0, 2\)"),
        (lambda: WHOLE.without(3, time_s=1.0), r"\(3, 0\)"),
        (lambda: WHOLE.without(0, 1, time_s=-1.0), "time_s=-1.0; allowed is 0 or more"),
        (lambda: WHOLE.without(0, 1, time_s=math.nan), "time_s=nan"),
        (lambda: WHOLE.without(0, 1, time_s=math.inf), "time_s=inf"),
        (lambda: WHOLE.degraded(-1, 0.5), r"\(-1, 0\)"),
        (lambda: WHOLE.degraded(0, -0.5), "fraction=-0.5"),
        (lambda: WHOLE.changed(Change(-1.0, 0, 0, 1.0)), "change=-1.0"),
    ],
)
def test_nonsense_is_refused_with_what_was_given(make, why) -> None:
    with pytest.raises(InvalidArgument, match=why):
        make()


@pytest.mark.parametrize("module", [network, simulation])
def test_the_examples_are_true(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
