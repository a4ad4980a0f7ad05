"""What a simulation found: how long it took, and which port it was that took so long.

Imports NumPy. Invariant: values only; every figure is simulated, none measured.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from r2ccl.flowsim.routes import Floats


class Use(NamedTuple):
    """What ports did in one direction; with node ports there is one rail.

    Parameters
    ----------
    nbytes : ndarray of float64, shape (nnodes, nrails)
        Carried, also what was lost on the way and sent again.
    busy_s : ndarray of float64, shape (nnodes, nrails)
        Seconds with something to carry.
    capacity_nbytes : ndarray of float64, shape (nnodes, nrails)
        What the port could have carried in the whole time.
    """

    nbytes: Floats
    busy_s: Floats
    capacity_nbytes: Floats

    @property
    def utilisation(self) -> Floats:
        """Share of its capacity that each port carried, 0 to 1."""
        return np.divide(
            self.nbytes,
            self.capacity_nbytes,
            out=np.zeros_like(self.nbytes),
            where=self.capacity_nbytes > 0,
        )


class Bottleneck(NamedTuple):
    """The port that carried the largest share of its capacity, and that share."""

    node: int
    rail: int
    is_egress: bool
    utilisation: float

    def __str__(self) -> str:
        direction = "out of" if self.is_egress else "into"
        return (
            f"{direction} node {self.node}, rail {self.rail}: {self.utilisation:.1%} of what it "
            "could carry"
        )


class Outcome(NamedTuple):
    """Result of `simulate`.

    Parameters
    ----------
    time_s : float
        Seconds until the last op of the last rank is done.
    egress, ingress : Use
        What the ports of all nodes did.
    nslices : int
        Slices that went over links, those inside a node among them.
    nbatches : int
        Points in time at which something happened.
    """

    time_s: float
    egress: Use
    ingress: Use
    nslices: int
    nbatches: int

    @property
    def bottleneck(self) -> Bottleneck:
        """The most used port; close to 1: no schedule of the same bytes is faster."""
        found = []
        for use, is_egress in ((self.egress, True), (self.ingress, False)):
            shares = use.utilisation
            node, rail = divmod(int(shares.argmax()), shares.shape[1])
            found.append(Bottleneck(node, rail, is_egress, float(shares[node, rail])))
        return max(found, key=lambda port: port.utilisation)


__all__ = ["Bottleneck", "Outcome", "Use"]
