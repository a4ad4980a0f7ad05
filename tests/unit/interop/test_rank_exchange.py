"""The methods that r2ccl.init calls on an exchange of values, given only an allgather."""

from __future__ import annotations

from typing import Any

from r2ccl.interop.rank_exchange import RankExchange, named_ranks


class Recorded(RankExchange):
    """Exchange among ranks that all pass the same as this one; keeps what was passed."""

    passed: Any = "nothing"

    def allgather(self, value: Any) -> list[Any]:
        self.passed = value
        return [value if rank == self.Get_rank() else f"of {rank}" for rank in range(self._nranks)]


def test_a_broadcast_returns_the_value_of_the_root() -> None:
    ranks = Recorded(1, 3)
    assert (ranks.Get_rank(), ranks.Get_size()) == (1, 3)
    assert ranks.bcast("mine", 1) == "mine"
    assert ranks.bcast("mine", 2) == "of 2"


def test_only_the_root_of_a_broadcast_passes_its_value() -> None:
    ranks = Recorded(1, 3)
    ranks.bcast("a secret", 0)
    assert ranks.passed is None


def test_messages_name_one_rank_or_several() -> None:
    assert [named_ranks([1]), named_ranks([1, 3])] == ["rank 1", "ranks 1, 3"]
