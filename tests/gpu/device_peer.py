"""Another process on the GPU: maps an allocation, tells what is in it, and writes over it.

Arguments: number of the GPU, handle in hexadecimal, offset, bytes.
"""

import hashlib
import sys

from r2ccl.device.driver import CudaDevice


def main() -> None:
    ordinal, handle, offset, nbytes = sys.argv[1:]
    device = CudaDevice(int(ordinal))
    base = device.map(bytes.fromhex(handle))
    memory = device.allocate_pinned(int(nbytes))
    stream, done = device.make_stream(), device.make_event()
    device.copy(memory.ctypes.data, base + int(offset), memory.nbytes, stream)
    device.record(done, stream)
    assert device.synchronize(done, 30.0)
    print(hashlib.sha256(memory).hexdigest())
    memory[:] = 255 - memory
    device.copy(base + int(offset), memory.ctypes.data, memory.nbytes, stream)
    device.record(done, stream)
    assert device.synchronize(done, 30.0)
    device.unmap(base)
    device.close()


if __name__ == "__main__":
    main()
