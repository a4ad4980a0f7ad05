"""Parsers, formats and defaults of command-line values that several modules share."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

from r2ccl.config import nearest

#: Seconds in which the other ranks of a job can exit by themselves after a failure; their calls
#: raise PeerLost.
FAILURE_GRACE_S = 10.0

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def seconds(text: str) -> float:
    """Parse a time limit in seconds, above 0 and below 1e6.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a number above 0 and below 1e6; argparse reports it with status 2.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:  # also NaN
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed is more than 0 and less than 1e6 seconds"
        )
    return value


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts only the texts in `names`.

    For any other text, the type raises argparse.ArgumentTypeError, which suggests a similar name if
    there is one. The caller should also pass `names` as ``choices`` of the argument, so that shells
    complete them.
    """

    def parse(text: str) -> str:
        if text in names:
            return text
        near = nearest(text, names)
        hint = f"did you mean {near}? " if near else ""
        raise argparse.ArgumentTypeError(f"{text!r}; {hint}allowed are {', '.join(names)}")

    return parse


def parse_size(text: str) -> int:
    """Parse ``"256"``, ``"64K"``, ``"1.5M"``, ``"2G"`` into bytes; units are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a size, or not a whole number of bytes.
    """
    number, unit = text.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        nbytes = float(number) * _UNITS[unit]
    except ValueError:
        nbytes = -1.0
    if nbytes < 0 or not nbytes.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 256, 64K, 1.5M or 2G")
    return int(nbytes)


def parse_rate(text: str) -> int:
    """Parse the rate of a NIC, ``"400gbit"`` or ``"50GB/s"``, into bytes/s; units are decimal.

    A capital B stands for bytes, a lowercase b for bits.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a rate of at least 1 and less than 1e15 bytes/s.
    """
    found = re.fullmatch(r"([\d.]+) ?([kKMmGgTt]?)(bit/s|bit|bps|b/s|B/s)", text.strip())
    if found:
        number, prefix, unit = found.groups()
        nbits = 8 if unit == "B/s" else 1
        with contextlib.suppress(ValueError):
            rate = float(number) * _DECIMAL.get(prefix.lower(), 1) * nbits / 8
            if 1 <= rate < 1e15:
                return int(rate)
    raise argparse.ArgumentTypeError(f"{text!r} is not a rate; write 400gbit or 50GB/s")


def parse_duration(text: str) -> float:
    """Parse a time, ``"5us"``, ``"0.5ms"`` or ``"1s"``, into seconds.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not a time above 0 and below 1e6 s.
    """
    found = re.fullmatch(r"([\d.]+) ?([num]?)s", text.strip().lower())
    if found:
        with contextlib.suppress(ValueError):
            value = float(found[1]) * {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}[found[2]]
            if 0 < value < 1e6:
                return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a time; write 5us, 0.5ms or 1s")


def parse_sizes(text: str) -> list[int]:
    """Parse a comma-separated list of sizes.

    Raises
    ------
    argparse.ArgumentTypeError
        If `parse_size` refuses one of the sizes.
    """
    return [parse_size(part) for part in text.split(",")]


def parse_counts(text: str) -> list[int]:
    """Parse a comma-separated list of integers above 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If `text` is not such a list.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers; write 2,4")
    return counts


def format_size(nbytes: int) -> str:
    """Format a number of bytes: ``"256 B"``, ``"64 KiB"``, ``"1 MiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def size_range(begin: int, end: int, *, step: int, factor: float) -> Iterator[int]:
    """Yield sizes from `begin` to at most `end`.

    If `factor` is above 1, each size is the previous one times `factor`, rounded down, but at least
    one byte more; otherwise it is the previous one plus `step`.

    Raises
    ------
    ValueError
        If `factor` is at most 1 and `step` at most 0, so that the sizes would not grow.
    """
    if factor <= 1 and step <= 0:
        raise ValueError(f"step {step} and factor {factor} never reach {end} from {begin}")
    size = begin
    while size <= end:
        yield size
        # Add at least one byte, so that a range from 0 or with a small factor ends.
        # The product may be infinite, so `end` + 1, which ends the range as well, limits it.
        size = max(int(min(size * factor, end + 1)), size + 1) if factor > 1 else size + step


__all__ = [
    "FAILURE_GRACE_S",
    "format_size",
    "one_of",
    "parse_counts",
    "parse_duration",
    "parse_rate",
    "parse_size",
    "parse_sizes",
    "seconds",
    "size_range",
]
