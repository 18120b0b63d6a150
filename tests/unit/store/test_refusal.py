"""Refusal of an invalid setting: one sentence with its name and its valid values."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cotrain_store.refusal import EXIT_CODE, read_settings
from cotrain_store.settings import WorkerSettings

GIVEN = {"REDIS_URL": "unix:///r.sock", "DATA_DIR": str(Path("d")), "BASE_MODEL": "m"}


@pytest.mark.parametrize(
    ("name", "given", "limits"),
    [
        ("MICRO_BATCH_TOKENS", "64", ("'auto'", "256")),
        ("MICRO_BATCH_TOKENS", "many", ("'auto'", "integer")),
        ("MAX_RANK", "5000", ("1024",)),
        ("DEVICE", "tpu", ("'auto', 'cpu' or 'cuda'",)),
        ("SAMPLING_SHARE", "1", ("0.9",)),
        ("DISK_RESERVE_BYTES", "-1", ("0",)),
    ],
)
def test_a_refused_setting_is_named_with_its_valid_values(
    name: str, given: str, limits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (GIVEN | {name: given}).items():
        monkeypatch.setenv(f"COTRAIN_{variable}", value)
    with capture_logs() as lines, pytest.raises(SystemExit) as left:
        read_settings(WorkerSettings)
    assert left.value.code == EXIT_CODE
    reason = lines[0]["reason"]
    assert reason.startswith(f"COTRAIN_{name}: ")
    assert [limit for limit in limits if limit not in reason] == []
