"""Result of a simulation: simulated time, use of every port, and the bottleneck port."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from r2ccl.flowsim.routes import Floats


class Use(NamedTuple):
    """Use of all ports in one direction.

    The arrays have one element per port. If the rails of a node are simulated as one port (argument
    `node_ports` of `r2ccl.flowsim.simulation.simulate`), ``nrails`` is 1.

    Parameters
    ----------
    nbytes : ndarray of float64, shape (nnodes, nrails)
        Bytes carried, including bytes that a failure lost and that were sent again.
    busy_s : ndarray of float64, shape (nnodes, nrails)
        Seconds during which the port had data to carry.
    capacity_nbytes : ndarray of float64, shape (nnodes, nrails)
        Bytes that the port could have carried during the whole simulation.
    """

    nbytes: Floats
    busy_s: Floats
    capacity_nbytes: Floats

    @property
    def utilisation(self) -> Floats:
        """Bytes carried by each port as a share of its capacity, 0 to 1; 0 without capacity."""
        return np.divide(
            self.nbytes,
            self.capacity_nbytes,
            out=np.zeros_like(self.nbytes),
            where=self.capacity_nbytes > 0,
        )


class Bottleneck(NamedTuple):
    """Port with the highest utilisation, and that utilisation, 0 to 1.

    ``rail`` is 0 if the rails of a node are simulated as one port (argument `node_ports` of
    `r2ccl.flowsim.simulation.simulate`). ``is_egress`` is True for the direction out of the node.
    """

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
        Use of the ports of all nodes, per direction.
    nslices : int
        Number of slices sent, including slices within a node.
    nbatches : int
        Number of batches of simultaneous events that the simulation processed.
    """

    time_s: float
    egress: Use
    ingress: Use
    nslices: int
    nbatches: int

    @property
    def bottleneck(self) -> Bottleneck:
        """Port with the highest utilisation.

        If the utilisation is close to 1, a schedule can be faster only if it sends fewer bytes
        through that port.
        """
        found = []
        for use, is_egress in ((self.egress, True), (self.ingress, False)):
            shares = use.utilisation
            node, rail = divmod(int(shares.argmax()), shares.shape[1])
            found.append(Bottleneck(node, rail, is_egress, float(shares[node, rail])))
        return max(found, key=lambda port: port.utilisation)


__all__ = ["Bottleneck", "Outcome", "Use"]
