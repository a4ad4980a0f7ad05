"""Quorum: who may go on after deaths.

Pure: one rule. Invariant: of groups without a rank in common, at most one has a majority.
"""

from __future__ import annotations

from collections.abc import Collection

from r2ccl.errors import InvalidArgument


def has_quorum(nranks: int, alive: Collection[int], quorum: str = "majority") -> bool:
    """Whether the ranks `alive` of `nranks` may go on without the others.

    Others may be alive behind a partition and ask the same, so that at most one group is allowed
    to: one of more than half of the ranks, or the half with rank 0.

    Parameters
    ----------
    nranks : int
    alive : collection of int
        The ranks that go on.
    quorum : {"majority", "any"}
        "any" allows every group, for those who know that no other is left.

    Raises
    ------
    InvalidArgument
        An unknown `quorum`, or ranks that do not exist.
    """
    if quorum not in ("majority", "any"):
        raise InvalidArgument(f"quorum={quorum!r}; allowed is 'majority' or 'any'")
    ranks = set(alive)
    if not ranks <= set(range(nranks)):
        raise InvalidArgument(f"ranks {sorted(ranks)} alive; there are 0 to {nranks - 1}")
    if quorum == "any":
        return bool(ranks)
    return 2 * len(ranks) > nranks or (2 * len(ranks) == nranks and 0 in ranks)


__all__ = ["has_quorum"]
