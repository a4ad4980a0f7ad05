"""Hosts of a job: the list on the command line, MPI's host files, and the ranks of each host."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from r2ccl.errors import InvalidArgument

#: ``name`` or ``[IPv6 address]``, with or without ``user@`` before it and ``:slots`` after it. A
#: name does not begin with ``-``, which ssh would take as an option. Slots have at most six digits,
#: because `int` raises an error for a number of thousands of digits.
_HOST = re.compile(
    r"(?P<name>(?:[\w.][\w.-]*@)?(?:\[[\da-fA-F:.]+(?:%\w+)?\]|\w[\w.-]*))(?::(?P<slots>\d{1,6}))?"
)
_SLOTS = re.compile(r"slots=(?P<slots>\d{1,6})|max[_-]slots=\d+")
_HERE = ("localhost", "127.0.0.1", "::1")


class JobHost(msgspec.Struct, frozen=True):
    """Host and the number of ranks that it can run.

    ``name`` is the host argument of ssh: a name or an address, after ``user@`` if a user was given.
    """

    name: str
    slots: int

    @property
    def address(self) -> str:
        """Name or address without the user."""
        return self.name.rpartition("@")[2]

    def listed(self, count: int) -> str:
        """Return the host with `count` slots in the notation that `parse_hosts` reads."""
        user, at, address = self.name.rpartition("@")
        return f"{user}{at}[{address}]:{count}" if ":" in address else f"{self.name}:{count}"

    @property
    def is_here(self) -> bool:
        """True if ``name`` is in `_HERE` or is the name of this host; no ssh is then needed.

        The name of this host may be given in full, or without the part after its first dot. With
        ``user@``, and for all other names and addresses of this host, the value is False.
        """
        own = socket.gethostname()
        return self.name in (*_HERE, own, own.partition(".")[0])


def parse_hosts(text: str) -> list[JobHost]:
    """Return the hosts of a list like ``a:4,user@b:4,[fe80::1]:4``; a host has one slot by default.

    A host that is listed several times is returned once, with the sum of its slots.

    Raises
    ------
    InvalidArgument
        If the list is empty or malformed, or gives a host 0 slots.
    """
    found = []
    for item in text.split(","):
        match = _HOST.fullmatch(item.strip())
        if match is None:
            raise InvalidArgument(
                f"--hosts {text!r}: {item!r} is not a host: allowed is NAME or NAME:SLOTS, "
                "separated by commas, with an IPv6 address in brackets"
            )
        found.append(_host(match["name"], int(match["slots"] or 1), f"--hosts {text!r}"))
    return _merged(found)


def read_hostfile(path: str) -> list[JobHost]:
    """Return the hosts of a file with lines like ``a slots=4`` (Open MPI) or ``a:4`` (MPICH).

    Text after ``#`` is ignored. A host has one slot by default. ``max_slots``, Open MPI's limit for
    hosts that get more ranks than slots, has no effect, because here no host gets more ranks than
    slots. A host that is listed several times is returned once, with the sum of its slots.

    Raises
    ------
    InvalidArgument
        If the file cannot be read, is malformed, names no host, or gives a host 0 slots.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as exc:
        raise InvalidArgument(f"--hostfile {path!r} cannot be read: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        match, where = _HOST.fullmatch(words[0]), f"--hostfile {path!r}, line {number}"
        options = [_SLOTS.fullmatch(word) for word in words[1:]]
        if match is None or None in options:
            raise InvalidArgument(f"{where}: {line!r}: allowed is NAME slots=N, or NAME:N")
        given = [each["slots"] for each in (*options, match) if each is not None and each["slots"]]
        found.append(_host(match["name"], int(given[0]) if given else 1, where))
    if not found:
        raise InvalidArgument(f"--hostfile {path!r} names no host: write lines like `a slots=4`")
    return _merged(found)


def _host(name: str, slots: int, where: str) -> JobHost:
    if slots < 1:
        raise InvalidArgument(f"{where}: host {name} has {slots} slots; at least 1 is needed")
    return JobHost(re.sub(r"[\[\]]", "", name), slots)


def _merged(hosts: Sequence[JobHost]) -> list[JobHost]:
    """Return each host once, in the order of the list, with the sum of its slots."""
    slots: dict[str, int] = {}
    for each in hosts:
        slots[each.name] = slots.get(each.name, 0) + each.slots
    return [JobHost(name, count) for name, count in slots.items()]


def place(hosts: Sequence[JobHost], nranks: int | None) -> list[tuple[JobHost, int, int]]:
    """Return, for each host that gets ranks, the host, its first rank and its number of ranks.

    The hosts are filled in their order. If `nranks` is None, there is a rank for every slot.

    Raises
    ------
    InvalidArgument
        If `nranks` is below 1 or above the number of slots.
    """
    total = sum(host.slots for host in hosts)
    left = total if nranks is None else nranks
    if not 1 <= left <= total:
        raise InvalidArgument(
            f"-n {left}: the hosts have {total} slots; allowed is 1 to {total}; to run "
            "more ranks, give the hosts more slots: --hosts NAME:SLOTS,..."
        )
    placed, first = [], 0
    for host in hosts:
        count = min(host.slots, left - first)
        if count > 0:
            placed.append((host, first, count))
            first += count
    return placed


__all__ = ["JobHost", "parse_hosts", "place", "read_hostfile"]
