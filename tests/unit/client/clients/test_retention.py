"""Retention rules of checkpoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cotrain.clients.checkpoints import Rule, rules_of, superfluous
from cotrain.errors import UnsupportedInput
from cotrain.wire.rest import Checkpoint

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def checkpoint(age: int, **changes: object) -> Checkpoint:
    fields = {
        "checkpoint_id": f"weights/{age}", "checkpoint_type": "training",
        "tinker_path": f"tinker://r/weights/{age}", "time": NOW - timedelta(days=age), **changes,
    }  # fmt: skip
    return Checkpoint.model_validate(fields)


def test_a_text_is_a_list_of_rules() -> None:
    assert rules_of("last:3, best:eval/nll:2,highest:reward:1") == [
        Rule(3), Rule(2, "eval/nll"), Rule(1, "reward", is_highest=True),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "last", "last:0", "best:2", "last:1,", "worst:a:1", "best::1"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedInput, match="is no rule"):
        rules_of(text)


def test_what_no_rule_keeps_is_superfluous() -> None:
    kept = [
        checkpoint(0), checkpoint(1), checkpoint(2, metrics={"loss": 1.0}),
        checkpoint(4, public=True), checkpoint(5, expires_at=NOW),
        checkpoint(6, checkpoint_type="sampler"), checkpoint(7, metrics={"loss": 1.5}),
    ]  # fmt: skip
    doomed = [checkpoint(3, metrics={"loss": 2.0}), checkpoint(8)]
    assert superfluous([*reversed(kept), *doomed], rules_of("last:2, best:loss:2")) == doomed
    assert superfluous(kept[:1], rules_of("highest:loss:1")) == []
