"""A setting of an earlier version is not ignored in silence."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from cotrain_store.refusal import EXIT_CODE, read_settings
from cotrain_store.settings.removed import REPLACED_BY, removed_variables
from cotrain_store.settings.store import PREFIX, StoreSettings


def test_each_removed_variable_is_named_with_what_to_do_instead() -> None:
    environ = dict.fromkeys((f"{PREFIX}{name}" for name in REPLACED_BY), "1")
    sentences = removed_variables(environ | {"COTRAIN_LOG_LEVEL": "info"})
    assert len(sentences) == len(REPLACED_BY)
    assert (
        "COTRAIN_QUOTA_OPS is no setting any more: write ops=NUMBER into COTRAIN_QUOTAS."
        in sentences
    )


def test_a_process_does_not_start_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_QUOTA_OPS", "5")
    with capture_logs() as lines, pytest.raises(SystemExit) as left:
        read_settings(StoreSettings)
    assert left.value.code == EXIT_CODE
    assert "COTRAIN_QUOTAS" in lines[0]["reason"]
