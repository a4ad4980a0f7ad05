"""Texts that other ranks see name ranks by number: there, "this rank" is another rank."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "r2ccl"
#: Code whose texts one rank sends to others: an error that revokes the communicator, the evidence
#: of a loss, the detail of a probe, the reason why memory cannot be shared.
SENDERS = (
    "failover", "transport", "shm", "runtime/messages", "bootstrap/control.py", "bootstrap/peer.py",
)  # fmt: skip


def is_logged(node: ast.AST) -> bool:
    """Return whether `node` writes to the log of this rank, which no other rank sees."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "logger."))


def texts(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings below `node`, without docstrings and what only this rank sees."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_docstring or isinstance(node, ast.Assert) or is_logged(node):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


@pytest.mark.parametrize("part", SENDERS)
def test_texts_that_other_ranks_see_name_the_rank(part: str) -> None:
    root = PACKAGE / part
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(PACKAGE)}:{text.lineno}: {text.value}"
        for file in files
        for text in texts(ast.parse(file.read_text(encoding="utf-8")))
        if "this rank" in text.value or "this end" in text.value
    ]
    assert found == []
