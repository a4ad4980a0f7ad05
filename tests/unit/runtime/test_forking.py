"""A forked child loses the descriptors of communicators, also where no descriptor is left."""

from __future__ import annotations

import os
import socket

import pytest
from support.limits import no_descriptor_left

from r2ccl.runtime import forking


class Owner:
    """Owner of two connected sockets."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()
        self.is_disabled = False

    def descriptors(self) -> list[int]:
        return [-1, *(end.fileno() for end in self.ends)]

    def disable(self) -> None:
        self.is_disabled = True


@pytest.mark.parametrize("has_room", [True, False])
def test_a_child_keeps_neither_descriptors_nor_communicators(has_room: bool) -> None:
    owner = Owner()
    forking.hold(owner, Owner.descriptors, Owner.disable)
    null = os.stat(os.devnull).st_rdev
    if has_room:
        child = os.fork()
    else:
        with no_descriptor_left():
            child = os.fork()
    if not child:
        devices = [os.fstat(end.fileno()).st_rdev for end in owner.ends]
        os._exit(0 if owner.is_disabled and devices == [null, null] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not owner.is_disabled
    for end in owner.ends:
        assert os.fstat(end.fileno()).st_rdev != null
        end.close()
