"""Reads what a machine has of GPUs: some of it here, the rest in a process of its own.

Whatever calls the CUDA driver may crash, or never return, and leaves a process that must not fork:
it is in `r2ccl.cli.gpuprobe`, which must not be imported here. What that process knew when it
ended is what counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from r2ccl.cli.apart import Ended, run
from r2ccl.cli.cards import CudaFacts

#: Eight GPUs of which none was in use take some 20 s until all have a context.
_PROBE_TIMEOUT_S = 120.0

#: PCI: NVIDIA's number, and the class of display controllers.
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")


def read_cuda(
    nics: Sequence[str] = (), *, is_tried: bool = True, sysfs: Path = Path("/sys"),
    proc: Path = Path("/proc"),
) -> CudaFacts:  # fmt: skip
    """Read what there is to know of GPUs.

    Parameters
    ----------
    nics : sequence of str
        Labels of the RDMA ports to register device memory with; pyverbs must work.
    is_tried : bool
        Whether things are tried on the GPUs; else they are only read.
    sysfs, proc : Path
        Where these file systems are.
    """
    code = (
        "from r2ccl.cli.gpuprobe import survey\n"
        f"survey({tuple(map(str, nics))!r}, is_tried={is_tried!r})"
    )
    return msgspec.structs.replace(
        last_told(run(code, timeout_s=_PROBE_TIMEOUT_S)),
        pci=_controllers(sysfs),
        module=_module(proc),
        has_peermem=any((sysfs / "module" / name).is_dir() for name in _PEERMEM),
    )


def last_told(ended: Ended) -> CudaFacts:
    """Return the last facts that a process told, one set a line, and how it ended."""
    facts = CudaFacts(doing="starting")
    for line in ended.said.splitlines():
        try:
            facts = msgspec.json.decode(line, type=CudaFacts)
        except msgspec.DecodeError:  # another's line, or the process died while it wrote
            continue
    died = ended.error or ("it said nothing more" if facts.doing else "")
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
    """Return the version and the kind of the driver's kernel module; empty where there is none."""
    said = _text(proc / "driver/nvidia/version").partition("\n")[0]
    version = re.search(r"\b[0-9]+\.[0-9.]+\b", said)
    kind = "open" if "Open Kernel Module" in said else "closed"
    return f"{kind} kernel module {version[0]}" if version else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # it is not there, or may not be read
        return ""


__all__ = ["last_told", "read_cuda"]
