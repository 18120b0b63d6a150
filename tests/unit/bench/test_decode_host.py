from __future__ import annotations

import json
from pathlib import Path

from bench.__main__ import main


def test_with_overlap_the_device_does_not_wait_between_two_steps(tmp_path: Path) -> None:
    sizes = {"rows": 5, "adapters": 3, "tenants": 2, "steps": 4, "rounds": 1, "temperature": 1}
    given = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]

    assert main(["decode_host", *given, "--out", str(tmp_path)]) == 0

    (record,) = tmp_path.iterdir()
    one, overlapped = json.loads(record.read_text())["steps"]
    assert one["steps"] == overlapped["steps"] == 4
    assert one["waited_for_ms_least"] > 0
    assert overlapped["waited_for_ms"] == 0
