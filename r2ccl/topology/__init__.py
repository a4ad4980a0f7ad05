"""What the machine has: its NICs as rails, and the news about them.

Netlink and interface enumeration live here and nowhere else. This room must not import transports,
bootstrap or anything above them; it hands out values (`Nic`, `LinkEvent`).

Invariant: the same machine state and settings give the same rails in the same order.
"""

from r2ccl.topology.interfaces import Interface, discover, list_interfaces, select
from r2ccl.topology.monitor import LinkEvent, LinkMonitor

__all__ = ["Interface", "LinkEvent", "LinkMonitor", "discover", "list_interfaces", "select"]
