"""Results that all processes of a test run share: the first one that needs a result makes it."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(folder: Path, name: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returned, as JSON; only the first call with this `name` calls it.

    `folder` is the fixture ``run_folder``. A call while another one makes the result waits for it.
    If `make` raises, the next call makes the result.
    """
    path = folder / f"{name}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(make()))
    return json.loads(path.read_text())
