"""Types of command-line arguments that several subcommands share."""

from __future__ import annotations

import argparse


def seconds(text: str) -> float:
    """Parse a number of seconds for which the operating system can wait.

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
