"""torch's own tests of backends, which its wheel contains, on the backend r2ccl.

Usage: ``WORLD_SIZE=2 python torch_suite.py [NAME ...]``; without names all that apply.
"""

from __future__ import annotations

import inspect
import os
import re
import tempfile
import unittest

os.environ.setdefault("BACKEND", "r2ccl")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

from torch.testing._internal import common_distributed
from torch.testing._internal.common_utils import run_tests

import r2ccl.torch  # noqa: F401  # registers the backend

for _feature in ("ddp", "plugin", "subgroup"):
    common_distributed.DistTestCases.backend_feature[_feature].add("r2ccl")

# This module reads BACKEND when it is imported.
from torch.testing._internal.distributed import distributed_test  # noqa: E402

_LEFT_OUT = re.compile(
    r"@(skip_if_no_gpu|skip_if_lt_x_gpu|require_n_gpus_for_nccl_backend|skip_if_small_worldsize)"
)


class TestR2ccl(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
    """The tests; those that need a GPU or 8 ranks are left out: each would start processes to find out."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


for _name in dir(TestR2ccl):
    if _name.startswith("test_") and _LEFT_OUT.search(
        inspect.getsource(getattr(TestR2ccl, _name))
    ):
        setattr(TestR2ccl, _name, unittest.skip("needs a GPU, or 8 ranks")(lambda self: None))

if __name__ == "__main__":
    run_tests()
