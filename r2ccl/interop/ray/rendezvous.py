"""`join`: ranks that are Ray actors learn the address of rank 0 from another actor, and connect.

Rank 0 creates the other actor, an `ExchangeActor`, under a name that contains the name of the
group, and ends it when `join` of rank 0 has connected all ranks or has failed. The name can then be
used again, and a rank that Ray has restarted can join again. The `ExchangeActor` is not detached:
Ray ends it if rank 0 ends. In Ray, the secret of the job appears only in arguments and results of
the methods of `ExchangeActor`.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Unpack

import ray
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError

from r2ccl import (
    Communicator,
    Config,
    InvalidArgument,
    Settings,
    TransportError,
    TransportTimeout,
    init,
)
from r2ccl.clock import monotonic
from r2ccl.interop.rank_exchange import RankExchange, named_ranks

#: Pause in seconds before this rank again creates or looks for the exchange actor.
_PAUSE_S = 0.05
#: Longest time in seconds that Ray may take to deliver a reply of the exchange actor.
_REPLY_S = 10.0
#: Seconds for which a call to the exchange actor must stay unanswered before the timeout error
#: names this as the cause; half the time limit of `join`, if that is shorter.
_SILENCE_S = 1.0
#: Ray's default number of concurrent calls of an asynchronous actor. Each rank waits in one call.
_NCALLS = 1000


def join(
    world_size: int, rank: int, group_name: str = "default", **settings: Unpack[Settings]
) -> Communicator:
    """Connect this actor to the other ranks of a group; return the communicator.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    rank : int
        Rank of this actor, from 0. The driver, or a task, can be a rank, too.
    group_name : str
        Name of the group, equal on all its ranks. Groups that connect at the same time in one
        namespace of Ray need different names.
    **settings
        Fields of `Config`; they take precedence over their ``R2CC_*`` variables.

    Returns
    -------
    Communicator

    Raises
    ------
    InvalidArgument
        If `rank` is not in 0 to ``world_size - 1``, if the ranks differ in `world_size`, or for the
        reasons given in `r2ccl.init`.
    TransportTimeout
        If a rank does not join within ``R2CC_INIT_TIMEOUT_S``, or two actors join as the same rank.
    TransportError
        If rank 0 ends before all ranks are connected, or for the reasons given in `r2ccl.init`.
    PeerLost
        If a rank ends during `join`.
    CommunicatorRevoked, NoHealthyRail
        For the reasons given in `r2ccl.init`.

    Notes
    -----
    *Collective*: all ranks. If neither ``R2CC_SECRET`` nor ``R2CC_SECRET_FILE`` is set, rank 0
    generates the secret of the job and passes it to the other ranks through Ray. The connections of
    Ray are not encrypted, unless Ray is configured to use TLS.
    """
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"rank={rank} of world_size={world_size}; allowed is 0 to world_size - 1"
        )
    config = Config.from_env(os.environ, **settings)
    with _meet(group_name, world_size, rank, config.init_timeout_s) as ranks:
        nodes = ranks.allgather(ray.get_runtime_context().get_node_id())
        if len(set(nodes)) > 1 and not config.control_address:
            settings["control_address"] = ray.util.get_node_ip_address()
        return init(ranks, **settings)


class ExchangeActor:
    """Actor through which the ranks of one group exchange values.

    Parameters
    ----------
    nranks : int
        Number of ranks.
    """

    def __init__(self, nranks: int) -> None:
        self._nranks = nranks
        self._joined: dict[int, str] = {}
        self._values: dict[int, dict[int, Any]] = {}
        self._complete: dict[int, asyncio.Event] = {}
        self._is_closed = False

    async def close(self) -> None:
        """Make `join` register no more ranks, because Ray may take a moment to end this actor."""
        self._is_closed = True

    async def join(self, rank: int, call: str) -> int | None:
        """Register `rank`; return the number of ranks, or 0 if another `call` has registered it.

        The result is None if rank 0 has closed this actor. `call` identifies the call of the
        function `join`, which may call this method repeatedly.
        """
        if self._is_closed:
            return None
        return self._nranks if self._joined.setdefault(rank, call) == call else 0

    async def exchange(
        self, number: int, rank: int, value: Any, timeout_s: float
    ) -> tuple[list[Any], list[int]]:
        """Return the values that all ranks passed in exchange `number`, and the missing ranks.

        If ranks are missing after `timeout_s` seconds, the list of values is empty.
        """
        values = self._values.setdefault(number, {})
        complete = self._complete.setdefault(number, asyncio.Event())
        values[rank] = value
        if len(values) == self._nranks:
            complete.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await complete.wait()
        # The last value may have arrived after the timer fired.
        missing = [each for each in range(self._nranks) if each not in values]
        return ([] if missing else [values[each] for each in range(self._nranks)]), missing


class RayRanks(RankExchange):
    """Exchange of values among ranks through an `ExchangeActor`, for `r2ccl.init`.

    Parameters
    ----------
    meeting : ray.actor.ActorHandle
        Handle of the `ExchangeActor` of the group.
    group_name : str
    nranks, rank : int
    deadline_s : float
        Time at which exchanges time out, in seconds of the clock `monotonic`.
    """

    def __init__(
        self, meeting: Any, group_name: str, nranks: int, rank: int, deadline_s: float
    ) -> None:
        super().__init__(rank, nranks)
        self._meeting = meeting
        self._group_name = group_name
        self._deadline_s = deadline_s
        self._nexchanges = 0

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order.

        Raises
        ------
        TransportTimeout
            If a rank passes no value before the deadline, or Ray does not answer.
        TransportError
            If rank 0 has ended, or its `join` has failed.
        """
        self._nexchanges += 1
        left_s = max(0.0, self._deadline_s - monotonic())
        exchange = self._meeting.exchange.remote(self._nexchanges, self._rank, value, left_s)
        try:
            values, missing = ray.get(exchange, timeout=left_s + _REPLY_S)
        except RayActorError as exc:
            raise TransportError(
                f"rank {self._rank}: the actor that connects the group {self._group_name!r} of Ray "
                "actors ended before all ranks were connected, usually because rank 0 ended or its "
                "join() failed: look at the log of rank 0",
                rank=self._rank,
                peer=0,
            ) from exc
        except GetTimeoutError as exc:
            raise _timeout(self._rank, self._group_name, "Ray does not answer") from exc
        if missing:
            why = f"{named_ranks(missing)} did not call join()"
            raise _timeout(self._rank, self._group_name, why)
        return list(values)


@contextmanager
def _meet(group_name: str, nranks: int, rank: int, timeout_s: float) -> Iterator[RayRanks]:
    """Yield the `RayRanks` of a group; rank 0 makes the `ExchangeActor`, and ends it afterwards."""
    deadline_s = monotonic() + timeout_s
    if rank == 0:
        meeting = _create(group_name, nranks, deadline_s)
        try:
            yield RayRanks(meeting, group_name, nranks, rank, deadline_s)
        finally:
            with suppress(RayActorError, GetTimeoutError):
                ray.get(meeting.close.remote(), timeout=_REPLY_S)
            ray.kill(meeting)
    else:
        meeting = _find(group_name, nranks, rank, deadline_s)
        yield RayRanks(meeting, group_name, nranks, rank, deadline_s)


def _create(group_name: str, nranks: int, deadline_s: float) -> Any:
    make = ray.remote(ExchangeActor).options(
        name=_name_of(group_name), num_cpus=0, max_concurrency=max(_NCALLS, 2 * nranks)
    )
    while True:
        try:
            return make.remote(nranks)
        except ActorAlreadyExistsError as exc:
            # Ray may take a moment to end the actor of the previous group of this name.
            if monotonic() > deadline_s:
                raise _timeout(0, group_name, "another actor is rank 0 of this group") from exc
        time.sleep(_PAUSE_S)


def _find(group_name: str, nranks: int, rank: int, deadline_s: float) -> Any:
    why, call = "rank 0 did not call join()", uuid.uuid4().hex
    silence_s = min(_SILENCE_S, (deadline_s - monotonic()) / 2)
    while (left_s := deadline_s - monotonic()) > 0:
        limit_s = min(_REPLY_S, left_s)
        try:
            meeting = ray.get_actor(_name_of(group_name))
            found = ray.get(meeting.join.remote(rank, call), timeout=limit_s)
        except (ValueError, RayActorError):  # no actor yet, or that of the previous group
            time.sleep(_PAUSE_S)
            continue
        except GetTimeoutError:
            if limit_s > silence_s:  # else: the deadline came soon after this attempt began
                why = "the actor that rank 0 created does not answer"
            continue
        if found is None:  # the actor of the previous group of this name
            time.sleep(_PAUSE_S)
            continue
        if found == nranks:
            return meeting
        if found:
            raise InvalidArgument(
                f"world_size={nranks} on rank {rank}, but {found} on rank 0 of the group "
                f"{group_name!r}: pass the same number on all ranks"
            )
        why = f"another actor has joined as rank {rank}"
        time.sleep(_PAUSE_S)
    raise _timeout(rank, group_name, why)


def _name_of(group_name: str) -> str:
    return f"r2ccl-{group_name}"


def _timeout(rank: int, group_name: str, why: str) -> TransportTimeout:
    return TransportTimeout(
        f"rank {rank} did not join the group {group_name!r} of Ray actors within "
        f"R2CC_INIT_TIMEOUT_S: {why}; look at the logs of the actors with `ray logs`",
        rank=rank,
        status="TIMEOUT",
    )


__all__ = ["ExchangeActor", "RayRanks", "join"]
