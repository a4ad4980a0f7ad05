"""Run one rank of a job until an error ends it; print the error and its time."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import r2ccl


def main() -> None:
    with r2ccl.init() as comm:
        x = np.ones(int(sys.argv[1]) // 4, np.float32)
        comm.barrier()
        try:
            while True:
                comm.allreduce(x)
        except r2ccl.R2cclError as exc:
            report = {
                "error": type(exc).__name__,
                "peer": getattr(exc, "peer", None),
                "raised_s": time.monotonic(),
            }
        comm.abort()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
