"""Check of I6: commits after a worker was replaced, found in the failpoints of all processes."""

from __future__ import annotations

from collections.abc import Iterable


def accepted_from_replaced(reached: Iterable[str]) -> list[str]:
    """List the accepted commits that a worker began after its successor had entered.

    `reached` are the lines `<moment> <pid> <about>` of all processes, in the order of the moments.
    """
    violations = []
    holder: dict[str, str] = {}
    place: dict[str, str] = {}
    begun_late: set[str] = set()
    for line in reached:
        moment, pid, about = line.split(" ", 2)
        match moment:
            case "worker.entered":
                holder[about] = pid
                place[pid] = about
            case "worker.before_commit" if holder[place[pid]] != pid:
                begun_late.add(pid)
            case "worker.after_commit" if pid in begun_late:
                violations.append(f"I6 {pid} committed {about} after {place[pid]} was another's")
    return violations
