"""Setup of a lab inside its virtual machine: kernel modules, interfaces and RDMA devices.

Run ``python -m r2ccl.testing.rdmalab.guest --nodes 2 --nics 3`` as root, under a kernel with
rdma_rxe. Afterwards every port is ACTIVE and has its IPv4 address as a GID. A second run keeps the
devices that exist.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from r2ccl.errors import R2cclError
from r2ccl.testing.rdmalab.shape import (
    MachineShape,
    RdmaLabError,
    address_lines,
    device_lines,
    link_lines,
    sysctls,
)
from r2ccl.topology.hcas import Hca, list_hcas

_NET = Path("/sys/class/net")
_COMMAND_TIMEOUT_S = 60.0

#: Seconds until a port must be ACTIVE. The kernel's link watch reports a carrier within a second on
#: a real CPU, and later on an emulated one.
_PORTS_TIMEOUT_S = 30.0
_POLL_S = 0.05


def set_up(shape: MachineShape) -> None:
    """Make the devices of the lab that do not exist yet, and wait until all are usable.

    Raises
    ------
    RdmaLabError
        If a kernel module or a tool is missing, a tool or the kernel refuses a setting, or a port
        does not become usable in time.
    """
    for module in ("veth", "bridge", "rdma_rxe"):
        _call(["modprobe", module])
    netdevs = {each.name for each in _NET.iterdir()}
    _call(["ip", "-batch", "-"], link_lines(shape, netdevs))
    for key, value in sysctls(shape).items():
        _write(Path("/proc/sys", key), value)
    _call(["ip", "-batch", "-"], address_lines(shape))
    _call(["rdma", "-b", "-"], device_lines(shape, {each.name for each in list_hcas()}))
    _await_ports(shape)


def missing_ports(shape: MachineShape, hcas: Iterable[Hca]) -> list[str]:
    """Return one line for each device of the lab that is not usable yet, with the reason.

    `hcas` are the RDMA ports that the kernel has now.
    """
    found = {each.name: each for each in hcas}
    missing = []
    for node, rail in shape.places():
        name = shape.device(node, rail)
        wanted = f"::ffff:{shape.address(node, rail)}"
        if name not in found:
            missing.append(f"{name}: no such device")
        elif found[name].state != "ACTIVE":
            missing.append(f"{name}: {found[name].state}")
        elif wanted not in {gid.address for gid in found[name].gids}:
            missing.append(f"{name}: no GID {wanted}")
    return missing


def _await_ports(shape: MachineShape) -> None:
    give_up = time.monotonic() + _PORTS_TIMEOUT_S
    while missing := missing_ports(shape, list_hcas()):
        if time.monotonic() > give_up:
            raise RdmaLabError(
                f"RDMA ports were not usable after {_PORTS_TIMEOUT_S:.0f} s: {'; '.join(missing)}; "
                "for details run `ip link` and `rdma link` in the lab"
            )
        time.sleep(_POLL_S)  # sysfs sends no notification when a GID table changes


def _call(argv: Sequence[str], lines: Iterable[str] = ()) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(
            argv,
            input=text,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RdmaLabError(f"cannot run {' '.join(argv)}: {exc}") from exc
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RdmaLabError(f"{' '.join(argv)}: {said}{f'; its input: {text!r}' if text else ''}")


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value, encoding="ascii")
    except OSError as exc:
        raise RdmaLabError(f"cannot set {path} to {value}: {exc}") from exc


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 on failure, 2 on wrong usage."""
    default = MachineShape()
    parser = argparse.ArgumentParser(
        prog="python -m r2ccl.testing.rdmalab.guest",
        description="Make a lab's RDMA devices on this machine.",
    )
    parser.add_argument("--nodes", type=int, default=default.nodes)
    parser.add_argument("--nics", type=int, default=default.nics, help="RDMA devices per node")
    args = parser.parse_args(argv)
    try:
        set_up(MachineShape(nodes=args.nodes, nics=args.nics))
    except R2cclError as exc:
        print(f"r2ccl rdmalab, in the virtual machine: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ValueError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

__all__ = ["main", "missing_ports", "set_up"]
