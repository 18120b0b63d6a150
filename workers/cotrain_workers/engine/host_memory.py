"""How much memory the host has left for this process, and how much that has."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = Path("/proc/meminfo")
#: A container's own limit; a process outside any container finds no limit there.
GROUP = Path("/sys/fs/cgroup")


def free_host_bytes(memory: Path = MEMORY, group: Path = GROUP) -> int:
    """Return what is free on the host, or within this container's limit where that is less.

    Pages that the kernel can take back count as free.
    """
    of_host = _available(memory)
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _cached(group / "memory.stat")
    except (OSError, ValueError):  # another kind of control group, or the limit "max"
        return of_host
    return max(0, min(of_host, limit - used))


def resident_bytes() -> int:
    """Measure this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cached(statistics: Path) -> int:
    """Return the bytes of files in the page cache of a control group: they count as used, and can go."""
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    rows = dict(line.split() for line in lines)
    return sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))


def _available(memory: Path) -> int:
    try:
        lines = memory.read_text().splitlines()
    except OSError:  # not Linux: then all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib_by_name = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(kib_by_name["MemAvailable"]) * 1024
