"""The API's idea of a loss against the engine's."""

from __future__ import annotations

from cotrain_server.requests.loss_inputs import NEEDS_BY_LOSS
from cotrain_workers.engine.training.losses import LOSSES


def test_the_api_asks_for_what_the_engine_reads() -> None:
    assert {name: (spec.inputs, frozenset(spec.defaults)) for name, spec in LOSSES.items()} == {
        name: (needs.inputs, needs.config) for name, needs in NEEDS_BY_LOSS.items()
    }
