"""Report on the rails that r2ccl would use on a machine, and why other interfaces are not used.

The report depends only on the facts of `r2ccl.cli.doctor_report` and the settings; `r2ccl.topology`
chooses the rails. The rails are numbered as in a job on several hosts whose rendezvous uses none of
the rails' interfaces.

Invariants:

- A finding with level ``ok`` describes one rail, or all rails of one interface. The ``ok`` findings
  are in the order of the rail numbers.
- The finding of rails whose NICs are all declared failed has level ``skipped``.
- A finding with level ``warning`` or ``error`` names a fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from r2ccl.cli.diagnosis import DoctorFinding, Facts, Level
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.failover.exclusion import is_declared
from r2ccl.topology.hcas import NO_HCA, Hca, select_hcas
from r2ccl.topology.interfaces import VIRTUAL_PREFIXES, Interface, select
from r2ccl.topology.names import NameFilter
from r2ccl.types import Nic


class LocalRail(NamedTuple):
    """Interface or RDMA port that is a rail.

    ``is_failed`` is True if R2CC_FAILED_NICS declares the NIC of the rail failed; entries that give
    the host by its number do not count. ``is_last_resort`` is True if the interface is a rail only
    because of R2CC_LAST_RESORT, for ranks that have no other rail in common. If there are RDMA
    rails, ``is_last_resort`` is False for every rail, although all TCP rails are then the last
    resort.
    """

    name: str
    is_rdma: bool
    is_failed: bool
    is_last_resort: bool


def local_rails(facts: Facts, config: Config) -> list[LocalRail]:
    """Return the rails in the order of their numbers.

    Raises
    ------
    InvalidArgument
        If a setting is invalid or does not fit this machine, or no interface can be a rail.
    """
    nics, hcas = _selected(facts, config)
    names = [*(nic.name for nic in nics), *(hca.label for hca in hcas)]
    lasts = [*(nic.is_last_resort for nic in nics), *(False for _ in hcas)]
    return [
        LocalRail(
            name,
            number >= len(nics),
            is_declared(config.failed_nics, facts.hostname, number, name),
            is_last,
        )
        for number, (name, is_last) in enumerate(zip(names, lasts, strict=True))
    ]


def examine_rails(facts: Facts, config: Config) -> tuple[DoctorFinding, ...]:
    """Return one finding per interface and RDMA port: its rail, or the reason why it is no rail.

    Findings about rails come first; findings about all rails together come last. If a setting is
    invalid or does not fit this machine, or no interface can be a rail, the only finding is the
    error.
    """
    try:
        nics, hcas = _selected(facts, config)
    except InvalidArgument as exc:
        said = str(exc)
        return (
            DoctorFinding("rails", "error", said, "bring an interface up, or correct the setting"),
        )
    names = [hca.netdev for hca in hcas]
    found = [_interface(each, nics, facts, config, names) for each in facts.interfaces]
    found += [_port(each, hcas, len(nics), facts, config) for each in facts.hcas]
    rails = local_rails(facts, config)
    shown = [_marked(each, rails) for each in sorted(found, key=_order)]
    return (*shown, *_summary([rail.is_failed for rail in rails], hcas))


def select_ports(facts: Facts, config: Config) -> Sequence[Hca]:
    """Return the RDMA ports that are rails; none if pyverbs does not work.

    Raises
    ------
    InvalidArgument
        If R2CC_HCA is invalid, or names ports that cannot be used.
    """
    hcas = select_hcas(facts.hcas, config.hca)
    if not facts.pyverbs_error:
        return hcas
    if hcas and NameFilter(config.hca, variable="R2CC_HCA").is_selection:
        raise InvalidArgument(
            f"R2CC_HCA={config.hca} selects RDMA NICs, but pyverbs does not work here: repair it, "
            f"see below, or set R2CC_HCA={NO_HCA}"
        )
    return ()


def _selected(facts: Facts, config: Config) -> tuple[Sequence[Nic], Sequence[Hca]]:
    hcas = select_ports(facts, config)
    names = [hca.netdev for hca in hcas]
    return select(facts.interfaces, config, rdma_names=names), hcas


def _marked(finding: DoctorFinding, rails: Sequence[LocalRail]) -> DoctorFinding:
    """Return `finding`, changed to say which of its rails are declared failed.

    The result is ``skipped`` if all rails of the finding are declared failed. A finding may have
    several rails of one interface.
    """
    if finding.level != "ok":
        return finding
    name = rails[_number(finding)].name
    own = [number for number, rail in enumerate(rails) if rail.name == name]
    failed = [number for number in own if rails[number].is_failed]
    if not failed:
        return finding
    is_whole = failed == own
    which = "it" if is_whole else " and ".join(_name(number) for number in failed)
    them = "it" if len(failed) == 1 or is_whole else "them"
    says = f"{finding.says}: R2CC_FAILED_NICS declares {which} failed, so no data path uses {them}"
    return DoctorFinding(finding.check, "skipped" if is_whole else "ok", says)


def _interface(
    each: Interface, nics: Sequence[Nic], facts: Facts, config: Config, rdma_names: Sequence[str]
) -> DoctorFinding:
    what = f"{each.name} ({_speed(each.speed_mbps)}, {' '.join(each.addresses) or 'no address'})"
    used = [rail for rail, nic in enumerate(nics) if nic.name == each.name]
    if used:
        several = f", as {len(used)} rails" if len(used) > 1 else ""
        return DoctorFinding(_name(used[0]), "ok", what + several)
    level, why, fix = _why_not(each, config, rdma_names)
    if level == "warning" and each.name not in facts.cards:  # a virtual interface
        level, fix = "skipped", ""
    return DoctorFinding("no rail", level, f"{what}: {why}", fix)


def _why_not(each: Interface, config: Config, rdma_names: Sequence[str]) -> tuple[Level, str, str]:
    names = NameFilter(config.socket_ifname, variable="R2CC_SOCKET_IFNAME")
    is_named = names.is_selection and names.lists(each.name)
    if names.is_selection and not is_named:
        return "skipped", f"R2CC_SOCKET_IFNAME={config.socket_ifname} does not name it", ""
    if names.is_exclusion and names.lists(each.name):
        return "skipped", f"R2CC_SOCKET_IFNAME={config.socket_ifname} excludes it", ""
    if not is_named and each.is_loopback:
        return "skipped", "loopback: used only if all ranks are on one host", ""
    if not is_named and each.name.startswith(VIRTUAL_PREFIXES):
        return "skipped", "bridge of containers or virtual machines", ""
    if not each.is_up:
        fix = f"ip link set {each.name} up; if it is up, check the cable and the switch port"
        return "warning", "is down, or has no carrier", fix
    if not each.addresses:
        fix = f"ip address add ADDRESS/24 dev {each.name}"
        return "warning", "has no address that can be bound", fix
    if each.name in rdma_names:
        return "skipped", "its RDMA port is the rail", ""
    return "skipped", f"is not among the first R2CC_RAILS={config.rails} interfaces", ""


def _port(
    each: Hca, hcas: Sequence[Hca], first: int, facts: Facts, config: Config
) -> DoctorFinding:
    what = f"{each.label} (RDMA, {_speed(each.speed_mbps)}, {each.state})"
    if each in hcas:
        return DoctorFinding(_name(first + hcas.index(each)), "ok", what)
    return DoctorFinding("no rail", "skipped", f"{what}: {_why_no_port(each, facts, config)}")


def _why_no_port(each: Hca, facts: Facts, config: Config) -> str:
    if facts.pyverbs_error:
        return "pyverbs does not work here, see below"
    if each.state != "ACTIVE":
        return "is not ACTIVE, see below"
    if config.hca.strip() == NO_HCA:
        return f"R2CC_HCA={NO_HCA} turns RDMA off"
    names = NameFilter(config.hca, variable="R2CC_HCA")
    if names.is_selection:
        return f"R2CC_HCA={config.hca} does not name it"
    if names.lists(each.name, each.port):
        return f"R2CC_HCA={config.hca} excludes it"
    return "has no GID to send from, see below"


def _summary(failed: Sequence[bool], hcas: Sequence[Hca]) -> tuple[DoctorFinding, ...]:
    if failed.count(False) < 2:
        or_declare = ", or remove NICs that work from R2CC_FAILED_NICS" if any(failed) else ""
        return (
            DoctorFinding(
                "rails",
                "warning",
                "fewer than two usable rails: a job cannot survive the loss of a rail",
                f"add another interface with an address{or_declare}",
            ),
        )
    if hcas:
        return (
            DoctorFinding(
                "rails", "skipped", "with RDMA rails, TCP rails are only the last resort"
            ),
        )
    return (
        DoctorFinding(
            "rails",
            "skipped",
            "the interface of the rendezvous is no rail if there are others, unless "
            "R2CC_SOCKET_IFNAME names it; it is the last resort of ranks that have no rail in "
            "common (R2CC_LAST_RESORT)",
        ),
    )


def _name(rail: int) -> str:
    return f"rail {rail}"


def _order(finding: DoctorFinding) -> tuple[bool, int]:
    return (finding.level != "ok", _number(finding))


def _number(finding: DoctorFinding) -> int:
    number = finding.check.partition(" ")[2]
    return int(number) if number.isdigit() else 0


def _speed(mbps: int) -> str:
    return f"{mbps / 1000:g} Gbit/s" if mbps else "speed unknown"


__all__ = ["LocalRail", "examine_rails", "local_rails", "select_ports"]
