"""A descriptor that ends sleeps, and what may come after its close."""

import os
import select

from r2ccl.transport.wakeup import Wakeup


def is_readable(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.number], [], [], 0)[0])


def test_it_is_readable_from_a_wake_to_a_clear() -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup)
    wakeup.wake()
    wakeup.wake()
    assert is_readable(wakeup)
    wakeup.clear()
    wakeup.clear()
    assert not is_readable(wakeup)
    wakeup.close()


def test_a_wake_after_the_close_writes_to_nobodys_file() -> None:
    wakeup = Wakeup()
    reader, writer = os.pipe()
    wakeup.close()
    os.dup2(writer, wakeup.number)
    wakeup.wake()
    try:
        assert not select.select([reader], [], [], 0)[0]
    finally:
        for fd in (reader, writer, wakeup.number):
            os.close(fd)
