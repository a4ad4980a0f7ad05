"""Whoever annotates a program finds every type that the public interface returns in ``__all__``."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import r2ccl
import r2ccl.schedule
from r2ccl.communicator import Communicator
from r2ccl.config import SWITCHED, Algo, Config, Mode

#: Parts of a public value that only the planner reads.
INTERNAL = {"Choice.placement", "Choice.flows"}
#: Methods that take an array, and return none.
NO_RESULT = {"send", "recv", "sendrecv"}


def exported() -> dict[str, Any]:
    """All public names: those of r2ccl, and of the package of which users make schedules."""
    packages = (r2ccl, r2ccl.schedule)
    return {name: getattr(each, name) for each in packages for name in each.__all__}


def classes(hint: Any) -> Iterator[type]:
    """The classes that a type is made of."""
    for each in (hint, typing.get_origin(hint)):
        if isinstance(each, type):
            yield each
    for part in typing.get_args(hint):
        for each in part if isinstance(part, list) else (part,):
            yield from classes(each)


def hints(public: Any) -> Iterator[tuple[str, Any]]:
    """The types that a function returns, or the methods and attributes of a class, by name."""
    if inspect.isfunction(public):
        yield public.__name__, typing.get_type_hints(public)["return"]
    if not isinstance(public, type):
        return
    for name, member in vars(public).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__enter__"):
            for each in (function, *typing.get_overloads(function)):
                yield f"{public.__name__}.{name}", typing.get_type_hints(each).get("return")
    for name, hint in typing.get_type_hints(public).items():
        if not name.startswith("_"):
            yield f"{public.__name__}.{name}", hint


def test_names_imported_on_use_are_those_that_checkers_see() -> None:
    tree = ast.parse(Path(r2ccl.__file__).read_text(encoding="utf-8"))
    [block] = [each for each in tree.body if isinstance(each, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == r2ccl._HOMES
    assert set(seen) < set(r2ccl.__all__) <= set(dir(r2ccl))
    with pytest.raises(AttributeError, match="module 'r2ccl' has no attribute 'nothing'"):
        r2ccl.nothing  # noqa: B018


def test_every_type_that_is_returned_is_public() -> None:
    public = exported()
    missing = {
        f"{where}: {each.__module__}.{each.__name__}"
        for value in public.values()
        for where, hint in hints(value)
        if where not in INTERNAL
        for each in classes(hint)
        if each.__module__.startswith("r2ccl") and each not in public.values()
    }
    assert not missing
    assert len(public) > len(r2ccl.__all__)


def test_the_settings_of_init_are_the_fields_of_config() -> None:
    fields = {
        field.name: str | int if field.name in SWITCHED else field.type
        for field in msgspec.structs.fields(Config)
    }
    fields |= {"mode": Mode | str | int, "algo": Algo | str}
    assert typing.get_type_hints(r2ccl.Settings) == fields
    assert list(typing.get_type_hints(r2ccl.Settings)) == list(Config.__struct_fields__)


def test_every_collective_has_overloads_with_its_own_arguments() -> None:
    collectives = [
        (name, method)
        for name, method in vars(Communicator).items()
        if inspect.isfunction(method) and "async_op" in inspect.signature(method).parameters
    ]
    assert len(collectives) == 18
    for name, method in collectives:
        found = [inspect.signature(each) for each in typing.get_overloads(method)]
        assert len(found) == 3, name
        written = set(inspect.signature(method).parameters) - {"stream", "async_op"}
        for each in found:
            assert set(each.parameters) - {"kw", "async_op"} == written, name
        if name not in NO_RESULT:
            assert "Work[" in str(found[1].return_annotation), name
