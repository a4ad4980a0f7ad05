"""Filters of device names in NCCL's syntax, and the order in which devices are numbered.

Invariant: whether a filter lists a device depends only on the filter's text and on the name and the
port of the device; the order of devices depends only on their names. Processes with equal settings
therefore agree.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from r2ccl.errors import InvalidArgument


class _Rule(NamedTuple):
    name: str
    port: int | None
    is_exact: bool


class NameFilter:
    """Filter of device names: ``eth,ib``, ``=eth0,eth1``, ``^docker`` or ``mlx5_0:1,mlx5_2``.

    Names are separated by commas. A ``^`` at the start of the list makes the list an exclusion. A
    ``=`` at the start of the list, or after its ``^``, makes all names exact; a ``=`` before a
    later name makes only that name exact. All other names are prefixes. ``:`` and a number after a
    name select that port of the device.

    Parameters
    ----------
    text : str
        List of names; an empty list names no device.
    variable : str
        Name of the environment variable that contains the list, for error messages.

    Attributes
    ----------
    is_exclusion : bool
        True if the list begins with ``^``.

    Raises
    ------
    InvalidArgument
        If a name is missing (as in ``^`` or ``:1``), or a port is not a number.

    References
    ----------
    NCCL user guide, environment variables ``NCCL_SOCKET_IFNAME`` and ``NCCL_IB_HCA``.
    """

    def __init__(self, text: str, *, variable: str) -> None:
        self._given = f"{variable}={text!r}"
        stripped = self._text = text.strip()
        self.is_exclusion = stripped.startswith("^")
        body = stripped.removeprefix("^").strip()
        is_exact = body.startswith("=")
        items = [item.strip() for item in body.split(",") if item.strip()]
        self._rules = [self._parse(item, is_exact) for item in items]
        if stripped and not self._rules:
            raise self._missing_name()

    @property
    def is_selection(self) -> bool:
        """True if the list has names to include, not to exclude."""
        return bool(self._rules) and not self.is_exclusion

    def lists(self, name: str, port: int | None = None) -> bool:
        """Return whether the list names a device, even if the list is an exclusion.

        With `port`, return whether the list names that port of the device or the whole device.
        Without `port`, return whether the list names the whole device or any of its ports.
        """
        return any(
            (name == rule.name if rule.is_exact else name.startswith(rule.name))
            and (port is None or rule.port in (None, port))
            for rule in self._rules
        )

    def excluding(self, name: str) -> str:
        """Return the text of an exclusion that lists `name`.

        If this list is an exclusion, the result lists the names of this list too.
        """
        return f"{self._text},={name}" if self.is_exclusion else f"^={name}"

    def _parse(self, item: str, is_exact: bool) -> _Rule:
        name, colon, port = (part.strip() for part in item.removeprefix("=").partition(":"))
        if not name:
            raise self._missing_name()
        if colon and not re.fullmatch(r"[0-9]+", port):
            raise InvalidArgument(
                f"{self._given}: the port of {name!r} must be a number, as in {name}:1"
            )
        return _Rule(name, int(port) if colon else None, is_exact or item.startswith("="))

    def _missing_name(self) -> InvalidArgument:
        return InvalidArgument(
            f"{self._given}: a name is missing; write prefixes (eth,ib), exact names (=eth0,eth1) "
            "or an exclusion (^docker)"
        )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that compares runs of digits as numbers: ``eth2`` before ``eth10``."""
    return tuple(
        (0, int(part)) if part.isdecimal() else (1, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


__all__ = ["NameFilter", "natural"]
