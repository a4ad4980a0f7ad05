"""Experiments that show which driver calls wait for a stream that waits for the host.

The library allocates, maps and loads only while no stream waits for the host, with the exceptions
in `r2ccl.gpu.gpudirect`, because CUDA does not document which calls wait for the device. The
results show for which calls this is necessary, and how many operations fit in the launch queue
behind a wait. A stream is *parked* while it waits for the host.

Invariant: once a call has waited for `_DEADLINE_S`, the parked stream continues, so the call ends.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from gpu_outcome import Outcome

from r2ccl.device import Device
from r2ccl.dtypes import CODES
from r2ccl.errors import TransportError, TransportTimeout
from r2ccl.kernels.cuda import Form, ptx_of
from r2ccl.types import ReduceOp

#: Time after which a call counts as one that waits, in seconds.
_DEADLINE_S = 2.0
#: Longest time until a call ends after the stream continues, in seconds.
_TIMEOUT_S = 20.0
#: Largest number of operations that are enqueued behind a wait.
_MOST_ENQUEUED = 5000
_NBYTES = 1 << 20
_FORM = Form(dtype_code=CODES[np.dtype(np.float32)], op=ReduceOp.SUM)


class Measured(NamedTuple):
    """Result of a driver call while a stream is parked; ``error`` is empty if it succeeded."""

    name: str
    is_waiting: bool
    seconds: float
    error: str

    def __str__(self) -> str:
        if self.error:
            return f"{self.name}: {self.error}"
        how = "waits for the device" if self.is_waiting else "does not wait"
        return f"{self.name}: {how} ({self.seconds:.4f} s)"


class ParkedStream:
    """A stream that can be made to wait for a word of the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.make_stream(waits=True)
        memory = device.allocate_pinned(mmap.PAGESIZE)
        self._word = memory.view(np.uint32)
        self._at = int(memory.ctypes.data)
        self._number = 0

    @contextmanager
    def parked(self) -> Iterator[Callable[[], None]]:
        """Make the stream wait inside the ``with`` block; yield a function that ends the wait."""
        self._number += 1
        self._device.wait_word(self._stream, self._at, self._number)
        try:
            yield self._release
        finally:
            self._release()

    def enqueue(self) -> None:
        """Enqueue one operation: the write of another word."""
        self._device.write_word(self._stream, self._at + 64, 1)

    def _release(self) -> None:
        self._word[0] = self._number


def experiments(device: Device, handle: bytes | None, outcome: Outcome) -> None:
    """Run all experiments, and add their results to `outcome`.

    `handle` is the IPC handle of an allocation of another process; None if there is none.
    """
    stream = ParkedStream(device)
    for name, call in _calls(device, handle):
        measured = measure(name, call, stream, _DEADLINE_S)
        outcome.lines.append(f"behind a waiting stream, {measured}")
        outcome.rows.append({"measure": "parked", **measured._asdict()})
    depth = queue_depth(stream, _DEADLINE_S, _MOST_ENQUEUED)
    outcome.lines.append(f"{depth} operations fit behind a waiting stream, of {_MOST_ENQUEUED}")
    outcome.rows.append({"measure": "queue", "depth": depth})


def _calls(device: Device, handle: bytes | None) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield driver calls by name; each call that frees something follows the one that made it."""
    pages, ptx = (
        np.frombuffer(mmap.mmap(-1, _NBYTES), np.uint8),
        ptx_of(_FORM, device.capability, None),
    )
    made: list[Any] = []

    def keep(make: Callable[[], Any]) -> Callable[[], object]:
        return lambda: made.append(make())

    yield "cuMemAlloc", keep(lambda: device.allocate(_NBYTES))
    yield "cuMemFree", lambda: device.free(made.pop())
    yield "cuMemHostAlloc", keep(lambda: device.allocate_pinned(_NBYTES))
    yield "cuMemFreeHost", lambda: device.free_pinned(made.pop())
    yield "cuMemHostRegister", lambda: device.pin(pages)
    yield "cuMemHostUnregister", lambda: device.unpin(pages)
    yield "cuModuleLoadDataEx", lambda: device.load(ptx.text, ptx.entry)
    yield "cuEventCreate", device.make_event
    yield "cuStreamCreateWithPriority", device.make_stream
    if handle is not None:
        yield "cuIpcOpenMemHandle", keep(lambda: device.map(handle))
        yield "cuIpcCloseMemHandle", lambda: device.unmap(made.pop())


def measure(
    name: str, call: Callable[[], object], stream: ParkedStream, deadline_s: float
) -> Measured:
    """Make a call in another thread while `stream` is parked; then let the stream continue.

    Raises
    ------
    TransportTimeout
        If the call does not end after the stream continues, either.
    """
    ended: list[tuple[float, str]] = []

    def run() -> None:
        begun_s, error = time.monotonic(), ""
        try:
            call()
        except Exception as exc:  # of any library; reported in `error`
            error = f"{type(exc).__name__}: {exc}"
        ended.append((time.monotonic() - begun_s, error))

    thread = threading.Thread(target=run, daemon=True)
    with stream.parked() as release:
        thread.start()
        thread.join(deadline_s)
        is_waiting = thread.is_alive()
        release()
        thread.join(_TIMEOUT_S)
    if not ended:
        raise TransportTimeout(
            f"{name} did not end within {_TIMEOUT_S:g} s after the stream continued",
            status="TIMEOUT",
        )
    return Measured(name, is_waiting, *ended[0])


def queue_depth(stream: ParkedStream, deadline_s: float, most: int) -> int:
    """Return how many operations can be enqueued while `stream` is parked, before a call waits.

    A call waits if it does not return within `deadline_s` seconds. The result is at most `most`.
    """
    done = 0

    def run() -> None:
        nonlocal done
        for _ in range(most):
            stream.enqueue()
            done += 1

    thread = threading.Thread(target=run, daemon=True)
    with stream.parked() as release:
        thread.start()
        before = -1
        while thread.is_alive() and before < done:
            before = done
            thread.join(deadline_s)
        found = done
        release()
        thread.join(_TIMEOUT_S)
    return found


@contextmanager
def exported(ordinal: int) -> Iterator[bytes | None]:
    """Yield the IPC handle of an allocation of another process, which ends with the block.

    The handle is None if that process cannot export its memory.
    """
    code = (
        "import sys; from r2ccl.device.driver import CudaDevice; "
        f"device = CudaDevice({ordinal}); "
        f"print(device.export(device.allocate({_NBYTES}))[0].hex(), flush=True); "
        "sys.stdin.read(); device.close()"
    )
    paths = os.pathsep.join(each for each in sys.path if each)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    killer = threading.Timer(_TIMEOUT_S, process.kill)  # ends the read below, too
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        killer.cancel()
        yield bytes.fromhex(line) if line else None
    finally:
        killer.cancel()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_TIMEOUT_S)
        process.kill()
        process.wait()


def parked(device: Device, outcome: Outcome) -> None:
    """Run the experiments on a GPU.

    Raises
    ------
    TransportError
        If launches block, because a wait would then block the host.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise TransportError("CUDA_LAUNCH_BLOCKING is set: unset it", status="NO_STREAM_WAIT")
    with exported(device.ordinal) as handle:
        if handle is None:
            outcome.left_out.append("cuIpcOpenMemHandle: another process could not export memory")
        experiments(device, handle, outcome)


__all__ = [
    "Measured",
    "ParkedStream",
    "experiments",
    "exported",
    "measure",
    "parked",
    "queue_depth",
]
