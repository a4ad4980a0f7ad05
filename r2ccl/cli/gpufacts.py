"""Collection of facts about the GPUs of a machine, partly in a separate process.

Code that calls the CUDA driver may crash or never return, and its process must not fork. That code
is therefore in `r2ccl.cli.gpuprobe`, which runs in another process and must not be imported here.
That process prints its facts before each step; `read_cuda` uses the facts that it printed last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from r2ccl.cli.apart import Ended, run
from r2ccl.cli.cards import CudaFacts

_T = TypeVar("_T")

#: Seconds after which the process is killed. Making contexts on eight idle GPUs takes about 20 s.
_PROBE_TIMEOUT_S = 120.0

#: PCI vendor id of NVIDIA, and the class of display controllers.
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")

_facts_decoder = msgspec.json.Decoder(CudaFacts)


def read_cuda(
    nics: Sequence[str] = (), *, is_tried: bool = True, sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> CudaFacts:  # fmt: skip
    """Return the facts about the GPUs of this machine.

    Parameters
    ----------
    nics : sequence of str
        Labels of the RDMA ports that are rails, such as ``mlx5_0:1``, with which to register device
        memory if `is_tried`. If there are any, pyverbs must work.
    is_tried : bool
        If True, run tests on the GPUs; if False, only read their properties.
    sysfs, proc : Path
        Mount points of these file systems.
    """
    code = (
        "from r2ccl.cli.gpuprobe import survey\n"
        f"survey({tuple(map(str, nics))!r}, is_tried={is_tried!r})"
    )
    return msgspec.structs.replace(
        last_told(run(code, timeout_s=_PROBE_TIMEOUT_S)),
        pci=_controllers(sysfs),
        module=_module(proc),
        rails=tuple(nics),
        has_peermem=any((sysfs / "module" / name).is_dir() for name in _PEERMEM),
    )


def last_line(said: str, decoder: msgspec.json.Decoder[_T], default: _T) -> _T:
    """Decode the last line of `said` that `decoder` can decode.

    If there is no such line, return `default`.
    """
    found = default
    for line in said.splitlines():
        with suppress(msgspec.DecodeError):  # output of a library, or a line cut off by a crash
            found = decoder.decode(line)
    return found


def last_told(ended: Ended) -> CudaFacts:
    """Return the last facts that a process printed, with the error of the process in ``died``.

    Facts are lines with a `CudaFacts` as JSON; other lines are ignored. If the process printed no
    facts, only ``doing``, which is "starting", and ``died`` are set.
    """
    facts = last_line(ended.said, _facts_decoder, CudaFacts(doing="starting"))
    died = ended.error or ("it ended without an error message" if facts.doing else "")
    return msgspec.structs.replace(facts, died=died)


def _controllers(sysfs: Path) -> tuple[str, ...]:
    return tuple(
        sorted(
            place.name
            for place in sysfs.glob("bus/pci/devices/*")
            if _text(place / "vendor") == _NVIDIA and _text(place / "class").startswith(_DISPLAY)
        )
    )


def _module(proc: Path) -> str:
    """Return the kind and version of the driver's kernel module; empty if it is not loaded."""
    said = _text(proc / "driver/nvidia/version").partition("\n")[0]
    version = re.search(r"\b[0-9]+\.[0-9.]+\b", said)
    kind = "open" if "Open Kernel Module" in said else "closed"
    return f"{kind} kernel module {version[0]}" if version else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the file does not exist or must not be read
        return ""


__all__ = ["last_line", "last_told", "read_cuda"]
