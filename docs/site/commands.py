"""Reference of the command line as Markdown, made from its parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from r2ccl.cli import make_parser

_WIDTH = 79
_INDENT = " " * len("usage: ")


def reference() -> str:
    """Return a section per subcommand: its usage, its description, its arguments."""
    return "\n\n".join(_section(each) for each in subcommands())


def subcommands() -> list[argparse.ArgumentParser]:
    """Return the parsers of the subcommands, in the order of ``r2ccl --help``."""
    [choices] = [
        action.choices
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return list(choices.values())


def _section(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = partial(argparse.HelpFormatter, width=_WIDTH)
    usage = parser.format_usage().removeprefix("usage: ").rstrip().replace(f"\n{_INDENT}", "\n")
    parts = [f"## `{parser.prog}`", parser.description or "", f"```text\n{usage}\n```"]
    parts.append("\n".join(_arguments(parser)))
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.rstrip()}\n```")
    return "\n\n".join(part for part in parts if part)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        name = ", ".join(f"`{each}`" for each in _names(action))
        meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
        if not meaning and action.default not in (None, argparse.SUPPRESS):
            meaning = f"default {action.default}"
        yield f"| {_cell(name)} | {_cell(meaning)} |"


def _names(action: argparse.Action) -> list[str]:
    """Return the spellings of an argument, the last one with its value."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    shown = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return [shown]
    *others, last = action.option_strings
    return [*others, last if action.nargs == 0 else f"{last} {shown}"]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


__all__ = ["reference", "subcommands"]
