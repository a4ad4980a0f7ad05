"""Placement: where the NICs read and write for a piece of device memory.

The device's own memory where a NIC can reach it (`r2ccl.transport.dmabuf`), else a staging area in
pinned host memory. Sees neither pyverbs nor CUDA.

Invariant: a placement says which way was taken and why the better ones were not; each different
answer is logged once, staging as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from r2ccl.errors import InternalError, TransportError
from r2ccl.transport.cuda import CudaDriver
from r2ccl.transport.dmabuf import DeviceMemory, DeviceRegion, Route
from r2ccl.transport.regions import Registrar
from r2ccl.transport.registration import Registration, RegistrationCache

_log = logging.getLogger(__name__)

#: Different answers that are logged; a reason may name a size, and there is no end of those.
_MOST_LOGGED = 32


class Placement(msgspec.Struct, frozen=True):
    """Where the NICs read and write for a piece of device memory.

    Parameters
    ----------
    route : Route
    registration : Registration
        Of the device's allocation, or of the staging area; one user of it is the placement's, to
        be closed with it.
    address, nbytes : int
        What the NICs reach: the device memory itself, or the staging area, through which larger
        pieces go in parts.
    """

    route: Route
    registration: Registration
    address: int
    nbytes: int


class DevicePlacer:
    """Give every piece of device memory a place the NICs can reach.

    Parameters
    ----------
    registrars : sequence of Registrar
        One a NIC; those that are `DmabufRegistrar` too allow the first way.
    limit_nbytes : int
        Most device memory to keep registered (BAR space); idle registrations make room.
    driver : CudaDriver
    host : RegistrationCache
        Over the same NICs, for the staging area.
    staging_nbytes : int
        Size of the staging area, allocated when it is first needed.
    """

    def __init__(
        self,
        registrars: Sequence[Registrar],
        limit_nbytes: int,
        *,
        driver: CudaDriver,
        host: RegistrationCache,
        staging_nbytes: int,
    ) -> None:
        #: Registrations of device memory, to look up what was placed.
        self.registrations = RegistrationCache(
            registrars, limit_nbytes, memory=DeviceMemory(driver)
        )
        self._driver = driver
        self._host = host
        self._staging_nbytes = staging_nbytes
        self._staging: Registration | None = None
        self._logged: set[Route] = set()

    def place(self, address: int, nbytes: int, owner: Any = None) -> Placement:
        """Find the best place for `nbytes` bytes of device memory at `address`.

        Parameters
        ----------
        address, nbytes : int
        owner : object, optional
            For messages only; the caller keeps the memory while work on it is under way.

        Raises
        ------
        InvalidArgument
            The bytes do not lie in one allocation.
        TransportError
            Not even the staging area could be made.
        """
        try:
            found = self.registrations.find(address, nbytes)
            registration = found or self.registrations.register(address, nbytes, owner)
        except TransportError as exc:
            return self._stage(address, f"direct access: {exc}")
        region = registration.keys(0)
        assert isinstance(region, DeviceRegion)
        if found is not None:
            registration.share()
        self._say(region.route)
        return Placement(region.route, registration, address, nbytes)

    def close(self) -> None:
        """End every registration, then free the staging area; the NICs must have stopped.

        Raises
        ------
        InternalError
            A placement in the staging area is still open.
        """
        self.registrations.close()
        staging, self._staging = self._staging, None
        if staging is None:
            return
        staging.close()
        if staging.is_open:
            raise InternalError("the staging area of device memory was closed while in use")
        with self._driver.current(staging.base):
            self._driver.free_pinned(staging.base)

    def _stage(self, address: int, reason: str) -> Placement:
        if self._staging is None:
            with self._driver.current(address):
                self._staging = self._allocate()
        route = Route("staging", (reason,))
        self._say(route)
        staging = self._staging
        staging.share()
        return Placement(route, staging, staging.base, staging.nbytes)

    def _allocate(self) -> Registration:
        """Allocate the staging area and register it."""
        area = self._driver.allocate_pinned(self._staging_nbytes)
        try:
            return self._host.register(area, self._staging_nbytes, _PinnedArea())
        except BaseException:
            self._driver.free_pinned(area)
            raise

    def _say(self, route: Route) -> None:
        """Log a route once."""
        if route not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(route)
            level = logging.WARNING if route.method == "staging" else logging.INFO
            _log.log(level, "device memory is reached by %s", route)


class _PinnedArea:
    """Owner of the staging area; takes no weak references, so that its registration holds it."""

    __slots__ = ()


__all__ = ["DevicePlacer", "Placement"]
