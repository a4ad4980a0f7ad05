"""Choice of the network interfaces of the machine that become rails.

`list_interfaces` reads the machine, `select` is a pure function of the interfaces read, and
`discover` combines the two. Invariant: rail i is the same interface in all processes of a host that
have the same settings and find the same interfaces up, because the order depends only on names.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Sequence

import msgspec

from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.topology.names import NameFilter, natural
from r2ccl.types import Nic

#: Default number of rails on loopback: two, so that losing one is survivable.
DEFAULT_LOOPBACK_RAILS = 2

#: Rails on loopback use 127.0.0.1 to 127.0.0.254; Linux answers on all of 127.0.0.0/8.
MAX_LOOPBACK_RAILS = 254

#: Name prefixes of container and hypervisor bridges, which lead to no other host. NCCL excludes the
#: same prefixes.
VIRTUAL_PREFIXES = ("docker", "virbr")


class Interface(msgspec.Struct, frozen=True):
    """One network interface as the kernel lists it.

    ``index`` is the kernel's number of the interface. ``addresses`` are the addresses that a socket
    can bind without a scope: IPv4 first, then IPv6 except link-local. ``is_up`` is true if the
    interface is administratively up and has a carrier. ``speed_mbps`` is 0 if unknown.
    """

    name: str
    index: int
    addresses: tuple[str, ...]
    is_up: bool
    is_loopback: bool = False
    speed_mbps: int = 0


def discover(
    config: Config,
    *,
    exclude_addresses: Collection[str] = (),
    rdma_names: Collection[str] = (),
    is_one_host: bool = False,
) -> tuple[Nic, ...]:
    """Return the NICs of this machine that become rails.

    An interface qualifies only if it is up and has an address. If ``config.socket_ifname`` names
    interfaces, no others qualify. Otherwise, if all ranks run on this host, only loopback
    interfaces qualify. In all other cases, an interface qualifies if it is not loopback, not
    excluded by ``socket_ifname``, and its name has no prefix in `VIRTUAL_PREFIXES`.

    Parameters
    ----------
    config : Config
        ``socket_ifname`` selects interfaces. ``rails`` sets the number of rails, without the
        last-resort rail; 0 means one per interface, or 2 on loopback. ``last_resort`` sets the
        interface of the last-resort rail, which carries data only between two ranks that have no
        other rail left; it is ignored if the rails are on loopback, if `rdma_names` is not empty,
        or if it names an interface that already is another rail.
    exclude_addresses : collection of str
        Addresses of the management interface. An interface with one of these addresses is left out,
        except if ``socket_ifname`` names it, if no other interface qualifies, or if `rdma_names` is
        not empty. If ``last_resort`` is ``auto``, an interface that is left out for this reason
        carries the last-resort rail, unless ``socket_ifname`` excludes it.
    rdma_names : collection of str
        Name of the interface of each RDMA NIC in use, empty if the NIC has none. If there are RDMA
        NICs in use, all socket rails serve as last-resort rails beside RDMA. Unless
        ``socket_ifname`` names interfaces, these rails use the interfaces of other NICs, including
        the management interface; if there are none, they use the interfaces of the RDMA NICs.
    is_one_host : bool
        True if all ranks run on this host. Rails are then loopback addresses, unless
        ``socket_ifname`` names interfaces.

    Returns
    -------
    tuple of Nic
        NICs of the rails, at least one; element i is rail i. They are in natural order of their
        names (``eth2`` before ``eth10``), followed by the last-resort rail if there is one.

    Raises
    ------
    InvalidArgument
        If no interface qualifies, fewer than ``config.rails`` qualify, or ``config.last_resort``
        names no usable interface (the message then lists the interfaces found). Raised too if
        ``config.socket_ifname`` does not parse, or ``config.rails`` exceeds `MAX_LOOPBACK_RAILS` on
        loopback.
    OSError
        If the interfaces cannot be read.
    """
    return select(
        list_interfaces(),
        config,
        exclude_addresses=exclude_addresses,
        rdma_names=rdma_names,
        is_one_host=is_one_host,
    )


def select(
    interfaces: Sequence[Interface],
    config: Config,
    *,
    exclude_addresses: Collection[str] = (),
    rdma_names: Collection[str] = (),
    is_one_host: bool = False,
) -> tuple[Nic, ...]:
    """Choose rails among `interfaces`.

    The other parameters, the result and the InvalidArgument are those of `discover`.
    """
    names = NameFilter(config.socket_ifname, variable="R2CC_SOCKET_IFNAME")
    usable = sorted(
        (each for each in interfaces if each.is_up and each.addresses),
        key=lambda each: natural(each.name),
    )
    if names.is_selection:
        chosen = [each for each in usable if names.lists(each.name)]
    elif is_one_host:
        chosen = [each for each in usable if each.is_loopback]
    else:
        real = [
            each
            for each in usable
            if not each.is_loopback
            and not each.name.startswith(VIRTUAL_PREFIXES)
            and not names.lists(each.name)
        ]
        if rdma_names:
            others = [each for each in real if each.name not in rdma_names]
        else:
            others = [each for each in real if not _carries(each, exclude_addresses)]
        # A host with a single NIC uses it for control and data, and for sockets and RDMA.
        chosen = others or real
    if not chosen:
        raise _nothing_found(interfaces, config)
    if all(each.is_loopback for each in chosen):
        return _loopback_rails(chosen[0], config)
    if config.rails > len(chosen):
        raise InvalidArgument(
            f"R2CC_RAILS={config.rails}, but only {len(chosen)} interface(s) qualify: "
            f"{', '.join(each.name for each in chosen)}; lower R2CC_RAILS, or name more with "
            f"R2CC_SOCKET_IFNAME. Interfaces of this machine: {_describe(interfaces)}"
        )
    chosen = chosen[: config.rails or None]
    # With RDMA in use, all socket rails are last-resort rails already.
    allowed = [each for each in usable if not names.is_exclusion or not names.lists(each.name)]
    last = () if rdma_names else _last_resort(allowed, chosen, config, exclude_addresses)
    return (
        *(Nic(each.name, each.addresses[0], each.index, each.speed_mbps) for each in chosen),
        *(Nic(each.name, each.addresses[0], each.index, each.speed_mbps, True) for each in last),
    )


def _last_resort(
    usable: Sequence[Interface],
    chosen: Sequence[Interface],
    config: Config,
    control_addresses: Collection[str],
) -> list[Interface]:
    """Return the interface of the last-resort rail; an empty list if there is no such rail."""
    others = [each for each in usable if each not in chosen and not each.is_loopback]
    if config.last_resort == "auto":
        return [each for each in others if _carries(each, control_addresses)][:1]
    if config.last_resort == "none":
        return []
    named = [each for each in others if each.name == config.last_resort]
    if not named and all(each.name != config.last_resort for each in chosen):
        raise InvalidArgument(
            f"R2CC_LAST_RESORT={config.last_resort!r}: the interface must be up, have an address, "
            "and be neither loopback nor excluded by R2CC_SOCKET_IFNAME; allowed are auto, none or "
            "one of these interfaces: "
            f"{_describe(each for each in usable if not each.is_loopback)}"
        )
    return named


def list_interfaces() -> tuple[Interface, ...]:
    """Read the interfaces of this process's network namespace, in no particular order.

    Raises
    ------
    OSError
        If the kernel refuses a query, for example because no file descriptor is left.
    """
    import psutil  # imported late: it would lengthen the import of r2ccl by a tenth

    indexes = {name: index for index, name in socket.if_nameindex()}
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        # An alias label (eth0:1) has no index; an interface just removed has no state either.
        if name not in indexes or name not in states:
            continue
        addresses = (entry.address for entry in entries if entry.family in _FAMILIES)
        state = states[name]
        found.append(
            Interface(
                name=name,
                index=indexes[name],
                addresses=_bindable(addresses),
                is_up=state.isup,
                is_loopback="loopback" in state.flags.split(","),
                speed_mbps=state.speed,
            )
        )
    return tuple(found)


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _bindable(addresses: Iterable[str]) -> tuple[str, ...]:
    """Drop link-local IPv6 addresses, which need a scope to bind, and put IPv4 first."""
    parsed = [ipaddress.ip_address(address) for address in addresses]
    kept = [each for each in parsed if each.version == 4 or not each.is_link_local]
    return tuple(str(each) for each in sorted(kept, key=lambda each: each.version))


def _loopback_rails(loopback: Interface, config: Config) -> tuple[Nic, ...]:
    count = config.rails or DEFAULT_LOOPBACK_RAILS
    if count > MAX_LOOPBACK_RAILS:
        raise InvalidArgument(
            f"R2CC_RAILS={count}, but loopback allows at most {MAX_LOOPBACK_RAILS} rails; lower "
            "R2CC_RAILS"
        )
    return tuple(Nic(loopback.name, f"127.0.0.{rail + 1}", loopback.index) for rail in range(count))


def _carries(interface: Interface, addresses: Collection[str]) -> bool:
    return any(address in addresses for address in interface.addresses)


def _nothing_found(interfaces: Iterable[Interface], config: Config) -> InvalidArgument:
    asked = f"R2CC_SOCKET_IFNAME={config.socket_ifname!r}: " if config.socket_ifname else ""
    return InvalidArgument(
        f"{asked}no interface qualifies as a rail (it must be up and have an address; if the ranks "
        "are on several hosts, loopback, docker and virbr interfaces must be selected by name); "
        f"interfaces of this machine: {_describe(interfaces)}; "
        "select some with R2CC_SOCKET_IFNAME, e.g. eth,ib or =eth0,eth1"
    )


def _describe(interfaces: Iterable[Interface]) -> str:
    return (
        ", ".join(
            f"{each.name} ({'up' if each.is_up else 'down'}, "
            f"{' '.join(each.addresses) or 'no address'})"
            for each in interfaces
        )
        or "none"
    )


__all__ = ["Interface", "discover", "list_interfaces", "select"]
