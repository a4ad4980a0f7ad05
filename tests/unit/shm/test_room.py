"""Memory left on the host and in the cgroups of the process."""

from __future__ import annotations

import pytest

from r2ccl.shm.room import room_nbytes


class Machine:
    """Files of a machine."""

    def __init__(self, path):
        self.path = path

    def write(self, file, text):
        place = self.path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    made.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    made.write("proc/self/cgroup", "0::/\n")
    return made


def test_lines_without_a_number_are_skipped(machine):
    machine.write("proc/meminfo", "\nMemAvailable:\nMemAvailable: 900 kB\n")
    assert room_nbytes(machine.path) == 900 << 10


def test_host_alone_has_what_is_available(machine):
    assert room_nbytes(machine.path) == 900 << 10


def test_cgroup_with_the_least_left_counts(machine):
    machine.write("proc/self/cgroup", "0::/jobs/mine\n")
    for place, limit, used in (("jobs", "500000", 400_000), ("jobs/mine", "max", 1)):
        machine.write(f"sys/fs/cgroup/{place}/memory.max", f"{limit}\n")
        machine.write(f"sys/fs/cgroup/{place}/memory.current", f"{used}\n")
        machine.write(f"sys/fs/cgroup/{place}/memory.stat", "anon 5\ninactive_file 1000\n")
    assert room_nbytes(machine.path) == 101_000


def test_first_version_of_cgroups_is_read(machine):
    machine.write("proc/self/cgroup", "5:cpu,memory:/a\n4:pids:/\n")
    machine.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "7000\n")
    machine.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "9000\n")
    machine.write("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 500\n")
    assert room_nbytes(machine.path) == 0


def test_container_without_its_own_directory_uses_the_root(machine):
    machine.write("proc/self/cgroup", "4:memory:/outside/mine\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9000\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n")
    machine.write("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n")
    assert room_nbytes(machine.path) == 4000


def test_machine_without_these_files_has_no_limit(tmp_path):
    assert room_nbytes(tmp_path) > 1 << 60


def test_this_machine_has_some_memory():
    assert 0 < room_nbytes() < 1 << 50
