from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_workers.engine.device import free_host_bytes, memory_limit_bytes


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 2048 * 1024), ("1000000", 999_000), ("99999999", 2048 * 1024), ("10", 0)]
)
def test_the_limit_of_a_container_applies_if_it_is_lower(tmp_path: Path, limit: str, free: int) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9999 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")

    assert free_host_bytes(memory, tmp_path) == free


def test_cached_files_of_a_container_do_not_count_as_used(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 300\ninactive_file 500\n")

    assert free_host_bytes(memory, tmp_path) == 900


def test_outside_a_container_the_free_memory_is_that_of_the_host(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable: 1 kB\n")

    assert free_host_bytes(memory, tmp_path / "absent") == 1024
    assert free_host_bytes() > 0


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"memory.max": "5000"}, "0::/"),
        ({"memory.max": "max", "box/memory.max": "5000"}, "0::/box"),
        ({"memory/memory.limit_in_bytes": "5000"}, "8:pids:/\n5:memory:/"),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/box/memory.limit_in_bytes": "5000"},
            "5:cpu,memory:/box",
        ),
    ],
)
def test_the_limit_is_read_from_either_kind_of_control_group(tmp_path: Path, files: dict[str, str], own: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    (tmp_path / "cgroup").write_text(f"{own}\n")
    assert memory_limit_bytes(tmp_path, tmp_path / "cgroup") == 5000


def test_without_a_limit_the_memory_is_that_of_the_host(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path / "absent", tmp_path / "absent") >= free_host_bytes()
