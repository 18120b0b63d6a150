"""Records and result of a save."""

from __future__ import annotations

import torch

from cotrain_store.messages.ids import PoolId, RunId, SamplerId, TenantId, WorkerId, encode
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.saves import CheckpointRecord, SaveRequest
from cotrain_workers.checkpoints.files import Saved
from cotrain_workers.checkpoints.save_records import DoneSave, saves_of
from cotrain_workers.engine.ops import Failure, HostOptimizer, HostWeights, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec

RUN = RunId("s:train:0")
SPEC = AdapterSpec(rank=2, seed=5, train_mlp=False)
WEIGHTS = HostWeights(SPEC, torch.zeros(4))
OPTIMIZER = HostOptimizer(SPEC, torch.zeros(4), torch.zeros(4), step=1)


def saved(request: SaveRequest, optimizer: HostOptimizer | None = None) -> DoneSave:
    op = QueuedOp(RUN, 3, OpKind.SAVE, 0, "inline", 0, 0.0)
    step = Step(1, WorkerId("w0"), (op,), 0.0, {RUN: TenantId("t")})
    at = (RUN, 3)
    output = SaveOutput(WEIGHTS, optimizer)
    saves = saves_of(step, {at: encode(request).encode()}, {at: output}, PoolId("p"), "m")
    return saves[at]


def test_a_save_without_a_name_makes_the_requested_sampler() -> None:
    done = saved(SaveRequest(sampler=SamplerId("s:sample:4")))
    sampler, weights = done.records.user, done.records.weights
    assert isinstance(sampler, SamplerRecord)
    assert (sampler.id, sampler.session, sampler.tenant) == ("s:sample:4", "s", "t")
    assert (sampler.ephemeral, sampler.weights) == (True, "s:train:0:3")
    assert (weights.ref, weights.worker, weights.digest) == ("s:train:0:3", "w0", "")
    assert weights.lora == LoraSpec(rank=2, seed=5, train_mlp=False)
    assert done.saved == Saved(WEIGHTS)
    assert done.result.json() == {
        "path": None, "sampling_session_id": "s:sample:4", "type": "save_weights_for_sampler",
    }  # fmt: skip


def test_a_save_with_a_name_makes_a_checkpoint_that_may_expire() -> None:
    done = saved(SaveRequest(name="best", ttl_seconds=60, user_metadata={"step": 3}))
    checkpoint = done.records.user
    assert isinstance(checkpoint, CheckpointRecord)
    assert checkpoint.expires_at == checkpoint.created_at + 60
    assert checkpoint.user_metadata == {"step": 3}
    path = "tinker://s:train:0/sampler_weights/best"
    assert done.result.json() == {"path": path, "type": "save_weights_for_sampler"}
    forever = saved(SaveRequest(name="best")).records.user
    assert isinstance(forever, CheckpointRecord)
    assert forever.expires_at is None


def test_a_training_checkpoint_stores_the_optimizer_state() -> None:
    request = SaveRequest(name="best", kind="weights", overwrite=True, last=True)
    done = saved(request, OPTIMIZER)
    assert done.saved == Saved(WEIGHTS, OPTIMIZER)
    assert done.records.weights.has_optimizer
    assert (done.records.overwrite, done.records.last) == (True, True)
    path = "tinker://s:train:0/weights/best"
    assert done.result.json() == {"path": path, "type": "save_weights"}


def test_an_export_records_its_recipients_and_returns_the_requested_type() -> None:
    request = SaveRequest(
        name="out", kind="external_weights", age_recipients=("age1x",), answer={"type": "other"}
    )
    done = saved(request)
    assert done.saved.recipients == ("age1x",)
    assert done.records.weights.external
    path = "tinker://s:train:0/external_weights/out"
    assert done.result.json() == {"path": path, "type": "other"}
    plain = saved(SaveRequest(name="out", kind="external_weights"))
    assert not plain.records.weights.external
    assert plain.result.json() == {"path": path, "type": "save_weights_external"}


def test_a_failed_save_leaves_no_records() -> None:
    op = QueuedOp(RUN, 3, OpKind.SAVE, 0, "inline", 0, 0.0)
    step = Step(1, WorkerId("w0"), (op,), 0.0, {RUN: TenantId("t")})
    at = ("s:train:0", 3)
    assert saves_of(step, {at: b""}, {at: Failure("No.", "server")}, PoolId("p"), "m") == {}
