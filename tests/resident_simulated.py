"""Run a resident kernel in Numba's CUDA simulator and print, as JSON, what became of its jobs.

To be run with NUMBA_ENABLE_CUDASIM=1. The simulator runs one block to its end before the next
begins: a kernel of one block finds all of them there, one of two waits in vain for the second.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from numba import cuda

from r2ccl.dtypes import CODES
from r2ccl.kernels.cuda import Form, canonical, resident, twins
from r2ccl.kernels.cuda.mailbox import Mailbox
from r2ccl.kernels.cuda.operands import numbers
from r2ccl.kernels.cuda.template import build
from r2ccl.types import ReduceOp

FORM = Form(dtype_code=CODES[np.dtype(np.int64)], op=ReduceOp.SUM, is_resident=True)
NTHREADS, COUNT, NJOBS = 2, 5, 3
#: Nanoseconds: a kernel that waits for blocks gives up soon, one that waits for jobs does not.
LIFE, IDLE, STALL = 10**11, 10**11, 10**7


def run(kernel: Any, nblocks: int) -> dict[str, Any]:
    """Post jobs and the wish to stop, run the kernel, and say what is in memory then."""
    words = np.zeros(resident.MAILBOX_NBYTES // 8 + 2, np.int64)
    board = np.zeros(resident.BOARD_NBYTES // 8, np.int64)
    total, added = np.zeros(COUNT, np.int64), np.arange(COUNT)
    mailbox = Mailbox(words.view(np.uint8))
    addresses = [int(each.ctypes.data) for each in (total, added, total)]
    for _ in range(NJOBS):
        mailbox.post([*addresses, COUNT * 8])
    mailbox.stop()

    given = (kind(value).value for value, kind in numbers(FORM, 1.0, 1))
    kernel[nblocks, NTHREADS](
        mailbox.address, int(board.ctypes.data), 0, LIFE, IDLE, STALL, *given
    )  # fmt: skip

    return {
        "done": mailbox.done,
        "ended": mailbox.ended,
        "total": total.tolist(),
        "published": int(board[resident.PUBLISHED // 8]),
        "arrived": int(board[resident.ARRIVED // 8]),
    }


def main() -> None:
    """Run one block, and two."""
    kernel = cuda.jit(build(canonical(FORM), twins, cuda))
    json.dump([run(kernel, nblocks) for nblocks in (1, 2)], sys.stdout)


if __name__ == "__main__":
    main()
