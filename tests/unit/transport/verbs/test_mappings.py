"""Children of forks get no device memory: their copy is replaced, the parent's stays."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    import ctypes, mmap, os
    from r2ccl.transport.verbs import mappings

    device = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_SHARED)
    device[:4] = b"bell"
    begin = ctypes.addressof(ctypes.c_char.from_buffer(device))
    mappings._mapped = lambda: iter([(begin, begin + len(device))])
    mappings.keep_from_children()
    mappings.keep_from_children()
    child = os.fork()
    if not child:
        is_replaced = device[:4] == bytes(4)
        device[:4] = b"ring"
        os._exit(0 if is_replaced else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert device[:4] == b"bell", "the child wrote to the device"
"""


def test_a_child_has_zeros_in_place_of_device_memory() -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], check=True, timeout=60)
