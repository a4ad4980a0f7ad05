"""Communicators for process groups: ranks meet through torch's store.

For the process group of all ranks, `r2ccl.init` makes the communicator; the ranks exchange the
address of rank 0 through the store. The communicators of all other groups are made from this
communicator and share its connections; if the group of all ranks has another backend, each group
uses `r2ccl.init`.

The keys in the store contain the number of the attempt, because a program may call
``init_process_group`` again on the store of torchrun, which still has the keys of the last call.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from r2ccl import Communicator, TransportError, TransportTimeout, init
from r2ccl.clock import monotonic
from r2ccl.interop.rank_exchange import RankExchange

#: Variable through which `r2ccl launch` passes rank 0 a socket that listens at R2CC_PORT. Ranks
#: that meet through a store do not use this socket, so rank 0 must listen at another port.
_LISTENER = "R2CC_LISTEN_FD"
_TIMEOUT = "R2CC_TIMEOUT_S"
_PREFIX = "r2ccl"


class StoreRanks(RankExchange):
    """Exchange of values among ranks through a store, for `r2ccl.init`.

    Parameters
    ----------
    store : torch.distributed.Store
    rank, nranks : int
    timeout : timedelta
        Longest wait for the other ranks in one exchange.

    Notes
    -----
    *Collective*: all ranks call the same methods in the same order. Methods that exchange values
    raise `TransportTimeout` if a rank does not take part within `timeout`, and `TransportError` if
    the store fails during this wait.
    """

    def __init__(self, store: Any, rank: int, nranks: int, timeout: timedelta) -> None:
        super().__init__(rank, nranks)
        self._store = store
        self._timeout = timeout
        self._attempt = store.add(f"{_PREFIX}/attempts/{rank}", 1)
        self._nrounds = 0

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order."""
        prefix = self._next_prefix()
        self._store.set(f"{prefix}/{self._rank}", data)
        keys = {rank: f"{prefix}/{rank}" for rank in range(self._nranks)}
        self._wait(keys)
        return [bytes(each) for each in self._store.multi_get(list(keys.values()))]

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; values must be convertible to JSON."""
        return [json.loads(each) for each in self.allgather_bytes(json.dumps(value).encode())]

    def bcast(self, value: Any, root: int) -> Any:
        """Return the value that rank `root` passed; it must be convertible to JSON."""
        key = self._next_prefix()
        if self._rank == root:
            self._store.set(key, json.dumps(value))
            return value
        self._wait({root: key})
        return json.loads(self._store.get(key))

    def _wait(self, keys: dict[int, str]) -> None:
        """Wait until the ranks in `keys` have set their keys."""
        began_s = monotonic()
        try:
            self._store.wait(list(keys.values()), self._timeout)
            return
        except RuntimeError as exc:  # a timeout, or the store has failed
            why = exc
        try:
            missing = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
        except RuntimeError as exc:
            raise TransportError(
                f"rank {self._rank}: torch's store does not answer ({exc}): look at the log of the "
                "process that serves it, usually rank 0 or the launcher",
                rank=self._rank,
            ) from exc
        if missing:
            raise TransportTimeout(
                f"rank {self._rank} waited {round(monotonic() - began_s, 1):g} s for these ranks "
                f"to make the same process group: {', '.join(missing)} ({why}): look at their own "
                "logs",
                rank=self._rank,
                status="TIMEOUT",
            ) from why

    def _next_prefix(self) -> str:
        self._nrounds += 1
        return f"{_PREFIX}/{self._attempt}/{self._nrounds}"


class TorchConnections:
    """Factory of the communicators of this process's groups.

    If the process group of all ranks uses r2ccl, its communicator makes the connections, and the
    communicators of all other groups share them. If not, each group connects its own ranks.
    """

    def __init__(self) -> None:
        self._whole: Communicator | None = None

    def connect(self, opts: Any) -> Communicator:
        """Return a new communicator for the ranks of a new group.

        Its calls have the time limit R2CC_TIMEOUT_S or, if that is not set, ``opts.timeout``; see
        `timeout_s_of` for a communicator that shares connections.

        Parameters
        ----------
        opts : torch.distributed._DistributedBackendOptions

        Raises
        ------
        TransportTimeout
            If a rank of the group does not make the group within ``opts.timeout``.
        TransportError
            If the store fails during a wait for other ranks.
        R2cclError
            If `r2ccl.init` or `Communicator.create_among` raises it.

        Notes
        -----
        *Collective*: all ranks of the group.
        """
        ranks = StoreRanks(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        members = list(opts.global_ranks_in_group)
        whole = self._whole
        if members and whole is not None:
            timeout_s = timeout_s_of(opts.timeout)
            return whole.create_among(members, ranks.allgather_bytes, timeout_s=timeout_s)
        settings: dict[str, Any] = {}
        if _TIMEOUT not in os.environ:
            settings["timeout_s"] = opts.timeout.total_seconds()
        if _LISTENER in os.environ:
            settings["port"] = 0
        made = init(ranks, **settings)
        if not members:
            self._whole = made
        return made

    def forget(self, communicator: Communicator) -> None:
        """Make no more communicators from `communicator`, because this rank leaves its group."""
        if self._whole is communicator:
            self._whole = None


def timeout_s_of(given: timedelta) -> float | None:
    """Return the time limit in seconds for the calls of a group made with the timeout `given`.

    Return None if R2CC_TIMEOUT_S is set, or if `given` is torch's default, which torch passes if
    the program gives no timeout. The group then has the time limit of the communicator from which
    its communicator is made.
    """
    if _TIMEOUT in os.environ or given == default_pg_timeout:
        return None
    return float(given.total_seconds())


__all__ = ["StoreRanks", "TorchConnections", "timeout_s_of"]
