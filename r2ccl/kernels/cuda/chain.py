"""Plans a chain of kernels that combines more inputs than one kernel takes.

Invariant: operands are combined from the left, in the order given. This module must not import
Numba.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from r2ccl.errors import InvalidArgument
from r2ccl.kernels.cuda.form import MOST, Form


class ChainStep(msgspec.Struct, frozen=True):
    """One kernel of a chain: its form and the addresses of its inputs and outputs."""

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
        The computation; its `ninputs` and `noutputs` are ignored.
    sources, targets : sequence of int
        Addresses, as for `Launcher.launch`; 1 to `MOST` targets.
    scratch : int or None
        Address of a scratch buffer of the size of an input, or None if there is none. Partial
        results are stored there if every target is also an input of a later kernel.

    Returns
    -------
    tuple of ChainStep
        Kernels to launch in this order on one stream, all with the same factor and number of ranks.

    Raises
    ------
    InvalidArgument
        If there is no memory for partial results, or if a form is invalid.

    Notes
    -----
    The result has the same bits as the result of a single kernel with all inputs, except with
    `is_wide`: between two kernels, a partial result is rounded to the type.
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
        f"no place for partial results: the {len(later)} inputs of later kernels include all "
        f"outputs ({len(targets)}); pass scratch memory that is not an input"
    )


__all__ = ["ChainStep", "chain"]
