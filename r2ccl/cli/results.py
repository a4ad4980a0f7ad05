"""Files with the results of a command: the option ``--json FILE``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from r2ccl.config import VERSION
from r2ccl.errors import InvalidArgument


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Exit status of a rank, as in the file of ``--json``.

    Attributes
    ----------
    rank : int
    host : str
    status : int or None
        Exit status; ``-n`` if signal n ended the rank; None if it is unknown.
    """

    rank: int
    host: str
    status: int | None


def add_option(parser: argparse.ArgumentParser, contents: str) -> None:
    """Add ``--json FILE`` to `parser`; its help names the `contents` of the file."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"write {contents} to a file as JSON"
    )


def check_file(path: Path) -> None:
    """Check that `path` can be written, by opening the file; make no folder.

    The file keeps its contents; if it is missing, it stays missing.

    Raises
    ------
    InvalidArgument
        If the file cannot be written, if its folder is missing, or if it is a named pipe, which
        would block this process until another process reads from the pipe.
    """
    if path.resolve().is_fifo():
        raise _not_written(path, "it is a named pipe")
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as exc:
        raise _not_written(path, exc.strerror) from exc


def write_file(path: Path, document: Any) -> None:
    """Write `document`, which msgspec can encode, to `path` as JSON; make a missing folder.

    Raises
    ------
    InvalidArgument
        If the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text + b"\n")
    except OSError as exc:
        raise _not_written(path, exc.strerror) from exc


def as_utf8(text: str) -> str:
    r"""Return `text` with each byte that is not UTF-8 escaped: a byte FF becomes ``\xff``.

    In arguments, file names and environment variables, Python represents such a byte by a
    surrogate character.
    """
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def write_result(path: Path, **fields: Any) -> None:
    """Write a JSON object to `path` that contains `fields` and the version of r2ccl.

    Raises
    ------
    InvalidArgument
        If the file cannot be written.
    """
    write_file(path, {"version": VERSION, **fields})


def _not_written(path: Path, why: str | None) -> InvalidArgument:
    return InvalidArgument(
        f"--json {path} cannot be written ({why}): give the path of a file in a writable folder"
    )


__all__ = ["RankEnd", "add_option", "as_utf8", "check_file", "write_file", "write_result"]
