"""Script of `support.jobs`: call a pickled function as a rank, and print its pickled result."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import pickle
import sys
import time
import traceback

from support.jobs import MARK

import r2ccl.runtime.compiled.call
import r2ccl.shm.group

#: Environment of the process that forks the ranks; a rank has that of its job in addition.
_BEFORE = dict(os.environ)

with contextlib.suppress(ImportError):  # an extra
    importlib.import_module("cuda.core.utils")  # 0.3 s, in each rank with arrays on a GPU

r2ccl.shm.group.preload()
r2ccl.runtime.compiled.call.preload()


def main(argument: str) -> None:
    given = json.loads(argument)
    own = {name: each for name, each in os.environ.items() if _BEFORE.get(name) != each}
    os.environ.clear()
    os.environ.update(given["environment"] | own)
    os.chdir(given["folder"])
    sys.path[:] = given["path"]
    try:
        value, is_good = pickle.loads(base64.b64decode(given["function"]))(), True
    except BaseException as exc:
        exc.add_note(traceback.format_exc())
        value, is_good = exc, False
    found = pickle.dumps((is_good, time.monotonic(), value))
    print("\n" + MARK + base64.b64encode(found).decode(), flush=True)
