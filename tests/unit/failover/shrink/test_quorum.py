"""Who may go on: never two groups at once, unless the user says so."""

import itertools

import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.failover.shrink.protocol import has_quorum


@pytest.mark.parametrize(
    ("nranks", "alive", "is_enough"),
    [
        (4, {1, 2, 3}, True),
        (4, {0, 3}, True),
        (4, {1, 2}, False),
        (5, {0, 1}, False),
        (5, {2, 3, 4}, True),
        (2, {0}, True),
        (2, {1}, False),
        (1, {0}, True),
        (3, (), False),
    ],
)
def test_a_majority_or_the_half_with_rank_0(nranks: int, alive: set[int], is_enough: bool) -> None:
    assert has_quorum(nranks, alive) is is_enough


@pytest.mark.parametrize("nranks", range(1, 7))
def test_at_most_one_of_two_groups_goes_on_and_one_of_two_halves(nranks: int) -> None:
    for sides in itertools.product((0, 1), repeat=nranks):
        groups = [[rank for rank in range(nranks) if sides[rank] == side] for side in (0, 1)]
        assert sum(has_quorum(nranks, group) for group in groups) == 1


def test_any_allows_every_group_but_an_empty_one() -> None:
    assert has_quorum(8, [7], quorum="any")
    assert not has_quorum(8, [], quorum="any")


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"alive=\[0, 4\]: allowed are ranks 0 to 3"):
        has_quorum(4, [0, 4])
    with pytest.raises(InvalidArgument, match="quorum='all'; allowed is 'majority' or 'any'"):
        has_quorum(4, [0], quorum="all")
