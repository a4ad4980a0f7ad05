"""Progress display of a demo: a progress bar on a terminal, otherwise lines of text.

Without a terminal, each part of a training prints a line, and a further line appears after
10 s without output.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

#: Without a terminal, longest time without output.
_SILENCE_S = 10.0

_COLUMNS = ("{task.description}", BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())


class Narration:
    """Progress display of several trainings; a context manager.

    Parameters
    ----------
    console : Console
    nparts, nsteps : int
        Number of parts and of steps in each training.
    part : str
        Name of a part, such as "epoch".
    """

    def __init__(self, console: Console, nparts: int, nsteps: int, part: str) -> None:
        self._console = console
        self._nparts = nparts
        self._name = part
        self._nsteps = nsteps
        self._bars = Progress(
            *_COLUMNS, "{task.fields[loss]}", console=console, disable=not console.is_terminal
        )
        self._task = self._bars.add_task("", visible=False)
        self._label = ""
        self._part = -1
        self._began_s = 0.0
        self._last_word_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._break_silences, daemon=True)

    def __enter__(self) -> Self:
        self._bars.start()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bars.stop()

    def begin(self, label: str) -> None:
        """Start the display of a training named `label`."""
        self._label, self._part, self._began_s = label, -1, time.monotonic()
        self._task = self._bars.add_task(label, total=self._nsteps, loss="")
        self._say("starting the ranks")

    def step(self, part: int, loss: float) -> None:
        """Advance the display by one step of `part`."""
        self._bars.update(self._task, advance=1, loss=f"loss {loss:.4f}")
        if part != self._part:
            self._part = part
            self._say(f"{self._name} {part + 1} of {self._nparts}, loss {loss:.4f}")

    def line(self, text: str) -> None:
        """Print a line of a rank's output."""
        self._last_word_s = time.monotonic()
        self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._last_word_s = time.monotonic()
        if not self._console.is_terminal:
            elapsed_s = self._last_word_s - self._began_s
            self._console.print(f"{self._label}: {text} ({elapsed_s:.0f} s)", soft_wrap=True)

    def _break_silences(self) -> None:
        while not self._is_over.wait(1.0):
            if time.monotonic() - self._last_word_s > _SILENCE_S:
                self._say(f"still waiting for the next {self._name}")
