from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_workers.engine.device import free_host_bytes


@pytest.mark.parametrize(
    ("limit", "free"),
    [("max", 2048 * 1024), ("1000000", 999_000), ("99999999", 2048 * 1024), ("10", 0)],
)
def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path, limit: str, free: int) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9999 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")

    assert free_host_bytes(memory, tmp_path) == free


def test_files_that_a_container_has_read_do_not_count_as_used(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 300\ninactive_file 500\n")

    assert free_host_bytes(memory, tmp_path) == 900


def test_outside_a_container_it_is_what_the_host_has(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable: 1 kB\n")

    assert free_host_bytes(memory, tmp_path / "absent") == 1024
    assert free_host_bytes() > 0
