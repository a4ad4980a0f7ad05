"""Pickling of functions, results and exceptions that travel between a launcher and its ranks.

Plain pickle sends functions and classes by reference: the receiver imports their module.
cloudpickle sends by value those that cannot be imported. cloudpickle itself is imported only when
it is needed: if plain pickle refuses a value, such as a lambda or a nested function; in programs
whose main module the receiver cannot import, such as a notebook; and for a `ByValue`.

Invariant: bytes from `dumps` are loaded by `pickle.loads`, which imports cloudpickle if needed.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

from r2ccl.errors import InvalidArgument

#: Errors of pickle for objects that cannot be sent by reference, or at all.
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError)
#: Keys by which `multiprocessing.spawn.prepare` finds the main script.
_MAIN_NAME, _MAIN_PATH = "init_main_from_name", "init_main_from_path"


def can_import_main(preparation: dict[str, Any]) -> bool:
    """Return True if a new process can import the main script of this process.

    It cannot in a notebook or an interactive session, with ``python -c``, or if the script is read
    from stdin. The path of a script that does not exist is removed from `preparation`.

    Parameters
    ----------
    preparation : dict
        Result of `multiprocessing.spawn.get_preparation_data`.
    """
    if _MAIN_PATH in preparation and not Path(preparation[_MAIN_PATH]).exists():
        del preparation[_MAIN_PATH]  # a script from stdin has the path <stdin>
    return _MAIN_NAME in preparation or _MAIN_PATH in preparation


def dumps(value: Any, *, is_by_value: bool = False) -> bytes:
    """Return `value` pickled, by plain pickle if possible, otherwise by cloudpickle.

    Parameters
    ----------
    value : object
    is_by_value : bool
        Use cloudpickle even if plain pickle would work. In a notebook, plain pickle would send
        functions as references to a module that the receiver cannot import.

    Raises
    ------
    Exception
        If `value`, or a global that a function in it uses, cannot be pickled: the error of
        cloudpickle or of the object.
    """
    if not is_by_value:
        try:
            return pickle.dumps(value)
        except _REFUSALS:
            pass  # cloudpickle sends more, or raises its own error
    import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def dumps_call(
    fn: Any, who: str, *, args: tuple[Any, ...] | None = None, is_by_value: bool
) -> bytes:
    """Return the function `fn`, or the tuple of `fn` and its `args`, pickled by `dumps`.

    Raises
    ------
    InvalidArgument
        If `fn` is not callable, or the call cannot be pickled; the message begins with `who`.
    """
    if not callable(fn):
        raise InvalidArgument(
            f"{who}: fn={fn!r} is not callable: pass the function itself, without calling it"
        )
    call = fn if args is None else (fn, args)
    try:
        return dumps(call, is_by_value=is_by_value)
    except Exception as exc:  # objects raise what they like from __reduce__
        raise InvalidArgument(
            f"{who}: {call!r} cannot be sent to another process ({exc}): use only arguments and "
            "global variables that can be pickled, and create all other objects in the function"
        ) from exc


class ByValue:
    """Callable that wraps a function, which is sent by value when the callable is pickled.

    For functions of a module that the receiver cannot or need not import, such as a test module.

    Parameters
    ----------
    function : callable
        Called without arguments when this object is called.
    module : module
        Functions and classes of this module are sent by value, with the globals that they use.
    """

    def __init__(self, function: Any, module: ModuleType) -> None:
        self._function = function
        self._module = module

    def __call__(self) -> Any:
        """Call the function."""
        return self._function()

    def __repr__(self) -> str:
        return repr(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        import cloudpickle

        cloudpickle.register_pickle_by_value(self._module)
        try:
            return pickle.loads, (cloudpickle.dumps(self._function),)
        finally:
            cloudpickle.unregister_pickle_by_value(self._module)


__all__ = ["ByValue", "can_import_main", "dumps", "dumps_call"]
