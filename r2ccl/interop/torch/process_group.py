"""`R2cclProcessGroup` and `R2cclBackend`: classes of torch with the methods of `GroupMethods`.

torch accepts process groups that are written in Python. torch 2.14 and newer expect such a group to
contain a `torch._C._distributed_c10d.Backend`, whose attributes, for example the size, torch reads.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from r2ccl import Communicator, InvalidArgument
from r2ccl.interop.torch.methods import GroupMethods, GroupState
from r2ccl.interop.torch.rendezvous import TorchConnections, timeout_s_of
from r2ccl.interop.torch.works import translated

#: True if torch expects a process group to contain a Backend.
_HAS_BACKENDS = torch.__version__ >= (2, 14)

_connections = TorchConnections()


class R2cclBackend(GroupMethods, c10d.Backend):  # type: ignore[misc]
    """Backend that torch 2.14 and newer find in an `R2cclProcessGroup`; both share one state."""

    # In a subclass written in Python, the inherited properties would recurse without end.
    _supports_time_estimate = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_window = False

    def __init__(self, state: GroupState) -> None:
        c10d.Backend.__init__(self, state.communicator.rank, state.communicator.nranks)
        GroupMethods.__init__(self, state)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called `monitored_barrier`; `timeout` may be BarrierOptions."""
        super().monitored_barrier(getattr(timeout, "timeout", timeout), wait_all_ranks)


class R2cclProcessGroup(GroupMethods, dist.ProcessGroup):  # type: ignore[misc]
    """Process group of torch.distributed whose calls run on a `Communicator`.

    Parameters
    ----------
    communicator : Communicator
        Its ranks are the ranks of the group.
    store : torch.distributed.Store
        Store of the group.

    Attributes
    ----------
    communicator : Communicator
        Communicator that runs the calls; offers `repairs`, `health` and other methods that torch
        lacks.
    """

    def __init__(self, communicator: Communicator, store: Any) -> None:
        dist.ProcessGroup.__init__(self, communicator.rank, communicator.nranks)
        timeout = timedelta(seconds=communicator.config.timeout_s)
        forget = partial(_connections.forget, communicator)
        GroupMethods.__init__(self, GroupState(communicator, store, timeout, forget))
        self._backend = self._registered() if _HAS_BACKENDS else None

    def _registered(self) -> R2cclBackend:
        """Return a backend that shares the state of this group, registered with the group."""
        made, kind = R2cclBackend(self._state), dist.Backend.backend_type_map["r2ccl"]
        self._set_default_backend(kind)
        for device in self._device_types:
            self._register_backend(device, kind, made)
        return made

    @classmethod
    def connect(cls, opts: Any) -> R2cclProcessGroup:
        """Connect the ranks of a new group, and return the group.

        `opts` are torch's ``_DistributedBackendOptions``. *Collective*: all ranks of the group.

        Raises
        ------
        DistBackendError
            If the ranks do not meet in time, or cannot be connected.
        """
        with translated:
            made = _connections.connect(opts)
        return cls(made, opts.store)

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> R2cclProcessGroup | None:
        """Return a new group of `ranks`, which are ranks of this group; None on other ranks.

        ``ranks[i]`` becomes rank i of the new group. *Collective*: all ranks of this group, which
        may make several new groups at once: the ranks of one new group pass the same `ranks`.
        `timeout`, by default the timeout of this group, limits the calls of the new group; see
        `timeout_s_of` for the cases in which it has no effect. `opts` and `device_types` have no
        effect.
        """
        rank = self.communicator.rank
        is_in = rank in ranks
        with translated:
            made = self.communicator.split(
                min(ranks) if is_in else None,
                ranks.index(rank) if is_in else 0,
                timeout_s=self._state.timeout_s if timeout is None else timeout_s_of(timeout),
            )
        if made is None:
            return None
        group = R2cclProcessGroup(made, dist.PrefixStore(f"{group_name}/", self._state.store))
        group._set_group_name(group_name or "")
        group._set_group_desc(group_desc or "")
        return group

    # Attributes of a group that torch reads and sets

    def getGroupName(self) -> str:
        """Return the name of the group."""
        return self._state.name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._state.name = name
        if self._backend is not None:
            self._backend._set_group_uid(name)

    def getGroupDesc(self) -> str:
        """Return the description of the group."""
        return self._state.desc

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._state.desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._state.store

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(each) for each in dist.Backend.backend_capability["r2ccl"]]

    @translated
    def _get_backend(self, device: Any) -> R2cclProcessGroup | R2cclBackend:
        kinds = dist.Backend.backend_capability["r2ccl"]
        if torch.device(device).type not in kinds:
            raise InvalidArgument(
                f"r2ccl does not support tensors on {device}: allowed are {', '.join(kinds)}"
            )
        return self if self._backend is None else self._backend

    def _has_hooks(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<R2cclProcessGroup {self._state.name} of {self.communicator!r}>"


__all__ = ["R2cclBackend", "R2cclProcessGroup"]
