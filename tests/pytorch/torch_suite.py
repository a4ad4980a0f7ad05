"""A rank that runs torch's own tests of backends, which its wheel contains, on the backend r2ccl.

Usage: ``torch_suite.py FOLDER [NAME ...]``, with an empty folder for all ranks; without names, all
tests run. Prints a JSON object with the outcome of each test. torch's own runner starts new
processes for every test, which takes ten times as long.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

# Tests of what backends for CPUs have are skipped for backends of other names.
os.environ["BACKEND"] = "gloo"
os.environ["TEMP_DIR"] = sys.argv[1]

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import set_rng_seed

# This module reads BACKEND when it is imported, to decide what to skip.
from torch.testing._internal.distributed import distributed_test

import r2ccl.torch  # noqa: F401  # registers the backend

TIMEOUT = timedelta(seconds=30)
#: Tests that require the texts of gloo's errors. All others that apply must pass.
ABOUT_GLOO = (
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
)
#: torch 2.13 refuses `monitored_barrier` for all backends but gloo.
HAS_MONITORED_BARRIER = torch.__version__ >= (2, 14)


class TestR2ccl(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests, which run in this process."""

    def setUp(self) -> None:
        self.rank = int(os.environ["RANK"])

    def tearDown(self) -> None:
        pass

    def _barrier(self, *args: object, **kwargs: object) -> None:
        dist.barrier()


def outcome(name: str) -> str:
    """Run a test; return ``ok``, ``skipped``, or the error."""
    if name in ABOUT_GLOO:
        return "skipped"
    if name.startswith("test_monitored_barrier") and not HAS_MONITORED_BARRIER:
        return "skipped"
    # The name that this test expects.
    distributed_test.BACKEND = "r2ccl" if name == "test_get_backend" else "gloo"
    test = TestR2ccl(name)
    test.setUp()
    method = getattr(test, name)
    if getattr(method, "__unittest_skip__", False):
        return "skipped"
    store = f"file://{sys.argv[1]}/store-{name}"
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "r2ccl", init_method=store, rank=rank, world_size=nranks, timeout=TIMEOUT
    )
    set_rng_seed(0)  # models are to be equal on all ranks
    try:
        dist.barrier()
        method()
    except (SystemExit, unittest.SkipTest):  # each rank skips for the same reason
        return "skipped"
    except BaseException as exc:
        traceback.print_exc()
        return f"{type(exc).__name__}: {exc}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "ok"


if __name__ == "__main__":
    for each in ("barrier", "init_dir", "test_dir"):
        Path(sys.argv[1], each).mkdir(exist_ok=True)
    names = sys.argv[2:] or unittest.TestLoader().getTestCaseNames(TestR2ccl)
    found = {}
    for each in names:
        print(f"== {each}", file=sys.stderr, flush=True)
        found[each] = outcome(each)
    print(json.dumps(found))
