"""Plans the kernels that combine more inputs than one kernel takes.

Pure. Must not import Numba. Invariant: operands are combined from
the left, in the order they are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.form import MOST, Form


class ChainStep(msgspec.Struct, frozen=True):
    """One kernel: its form, its inputs and outputs."""

    form: Form
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def chain(
    form: Form, sources: Sequence[int], targets: Sequence[int], *, scratch: int | None = None
) -> tuple[ChainStep, ...]:
    """Plan the kernels that combine any number of inputs.

    Parameters
    ----------
    form : Form
        What is done; its `ninputs` and `noutputs` are not looked at.
    sources, targets : sequence of int
        Addresses, as `Launcher.launch` takes them; 1 to `MOST` targets.
    scratch : int or None
        Address of as much memory, where partial results may lie if every target is an input that
        is read late.

    Returns
    -------
    tuple of ChainStep
        To be launched in this order on one stream, with one factor and one number of ranks.

    Raises
    ------
    InvalidArgument
        There is nowhere to put partial results, or a form has no meaning.

    Notes
    -----
    The bits are those of one kernel with that many inputs, but for `is_wide`: between two kernels a
    partial result is rounded to the type.
    """
    replace = msgspec.structs.replace
    inputs, later = tuple(sources[:MOST]), tuple(sources[MOST:])
    steps: list[ChainStep] = []
    while later:
        partial = _place_of_partial(targets, scratch, later)
        step = replace(form, ninputs=len(inputs), noutputs=1, is_divided=False)
        steps.append(ChainStep(step, inputs, (partial,)))
        form = replace(form, is_resumed=form.is_scaled)
        inputs, later = (partial, *later[: MOST - 1]), later[MOST - 1 :]
    last = replace(form, ninputs=len(inputs), noutputs=len(targets))
    return (*steps, ChainStep(last, inputs, tuple(targets)))


def _place_of_partial(targets: Sequence[int], scratch: int | None, later: Sequence[int]) -> int:
    for each in (*targets, scratch):
        if each is not None and each not in later:
            return each
    raise InvalidArgument(
        f"{len(later)} inputs are read late, and all outputs ({len(targets)}) are among them: pass "
        "scratch memory for partial results"
    )


__all__ = ["ChainStep", "chain"]
