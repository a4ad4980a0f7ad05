"""Print random docstrings and messages of the library, for a review of their wording.

``python docs/sample_prose.py SEED`` prints 30 docstrings and 10 messages. Rewrite every text that
must be read twice to be understood.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NDOCSTRINGS = 30
NMESSAGES = 10
#: Minimum length of a message in characters; shorter strings are names and formats.
_MIN_MESSAGE = 60

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(file: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a file, each with its file, line and name."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
            line = getattr(node, "lineno", 1)
            name = getattr(node, "name", "module")
            yield f"{file.relative_to(ROOT)}:{line} {name}\n\n{text}"


def messages(file: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the messages of raised errors and log calls, each with its file and line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = node.exc.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "logger.")):
            arguments = node.args[:1]
        else:
            continue
        for each in arguments:
            parts = each.values if isinstance(each, ast.JoinedStr) else [each]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts
            )
            if len(text) >= _MIN_MESSAGE:
                yield f"{file.relative_to(ROOT)}:{node.lineno}\n\n{text}"


def main(seed: int) -> None:
    """Print a random sample of docstrings and messages, the same for the same `seed`."""
    files = sorted((ROOT / "r2ccl").rglob("*.py"))
    trees = [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    rng = random.Random(seed)
    for find, number in ((docstrings, NDOCSTRINGS), (messages, NMESSAGES)):
        found = [each for file, tree in trees for each in find(file, tree)]
        for text in rng.sample(found, number):
            print(text, end=f"\n\n{'-' * 80}\n\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
