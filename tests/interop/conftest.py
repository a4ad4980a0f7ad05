"""A cluster of Ray and one of Dask on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Ray with two nodes, whose addresses are 127.0.0.2 and 127.0.0.3; yields its folder.

    Ray replaces 127.0.0.1 by another address of the machine.
    """
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        # Ray writes a token into the home directory. Its sockets need a folder with a short name.
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
        patch.setenv("HOME", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", path)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for number in (2, 3):
                cluster.add_node(
                    num_cpus=4,
                    include_dashboard=False,
                    node_ip_address=f"127.0.0.{number}",
                    resources={f"node{number}": 100},
                    object_store_memory=80 << 20,
                    **({"temp_dir": str(folder / "t")} if number == 2 else {}),
                )
            ray.init(address=cluster.address, _node_ip_address="127.0.0.2")
            yield folder
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def dask_client() -> Iterator[Any]:
    """Three workers of Dask with one thread each."""
    pytest.importorskip("distributed")
    from distributed import Client, LocalCluster

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
    ):
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", path)
        with (
            LocalCluster(
                n_workers=3,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address=None,
                local_directory=folder,
            ) as cluster,
            Client(cluster) as client,
        ):
            yield client
