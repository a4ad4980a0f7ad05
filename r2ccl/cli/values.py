"""Types of values in command lines that several subcommands have."""

from __future__ import annotations

import argparse


def seconds(text: str) -> float:
    """Return a number of seconds in the range that waits of the operating system allow.

    Raises
    ------
    ArgumentTypeError
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


__all__ = ["seconds"]
