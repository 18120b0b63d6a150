"""Requests of the engine, decoded from the bodies of ops and of samples."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain.wire.codec import decode_pass_output, decode_sample_response
from cotrain.wire.proto import wire_pb2
from cotrain.wire.sampling import PolicySpan
from cotrain_store.bodies.adapter_bodies import (
    LoadRequest,
    LoadSource,
    PeftAdapter,
    PeftModule,
    SaveRequest,
    encode_import,
)
from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, encode_reverse_kl
from cotrain_store.bodies.sample_body import TargetTokens
from cotrain_store.messages.ids import RequestId, RunId, SamplerId, TenantId, WeightsRef, encode
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_workers import op_codec as requests
from cotrain_workers.engine import ops as engine_ops
from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput
from cotrain_workers.engine.ops import (
    Create,
    CreateOutput,
    Failure,
    HostOptimizer,
    HostWeights,
    Import,
    Load,
    LoadOutput,
    NoteOutput,
    Op,
    OptimStep,
    Pass,
    PassOutput,
    ReverseKl,
    ReverseKlOutput,
    Save,
    StepOutput,
    WeightsMissing,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout, seed_of
from cotrain_workers.op_codec import sample_request, sample_result
from cotrain_workers.results import CYCLE_METRIC, result_of
from tests.support.bodies import optim_body, pass_body
from tests.support.samples import BODY


class Kept:
    """Checkpoints by their refs."""

    def __init__(self) -> None:
        self.weights: dict[str, HostWeights] = {}
        self.optimizers: dict[str, HostOptimizer | None] = {}

    def host(self, ref: WeightsRef) -> HostWeights:
        if ref not in self.weights:
            raise WeightsMissing(ref)
        return self.weights[ref]

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        return self.optimizers[ref]


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, [Target("model.q_proj", "attn", 16, 16)])


def op(kind: OpKind, seq: int = 1) -> QueuedOp:
    return QueuedOp(RunId("r"), seq, kind, 0, "inline", 0, 0.0)


def engine_op(queued: QueuedOp, body: bytes, kept: Kept | None = None) -> Op | NoteOutput | Failure:
    return requests.engine_op(queued, body, kept or Kept(), layout_of)


def test_a_create_op_has_every_choice_of_its_tenant() -> None:
    lora = LoraSpec(3, 9, train_attn=False, train_mlp=True, train_unembed=False, alpha=7.5)
    made = engine_op(op(OpKind.CREATE, 0), encode(lora).encode())
    spec = AdapterSpec(3, 9, train_attn=False, train_mlp=True, train_unembed=False, alpha=7.5)
    assert made == Create("r", 0, spec)


def test_a_logged_create_without_an_alpha_has_32() -> None:
    made = engine_op(op(OpKind.CREATE, 0), b'{"rank": 3, "seed": 9}')
    assert isinstance(made, Create)
    assert made.spec.alpha == 32.0


@pytest.mark.parametrize(("kind", "needs_grad"), [(OpKind.FORWARD, False), (OpKind.FORWARD_BACKWARD, True)])
def test_a_pass_has_its_datums_and_its_gradient_flag(kind: OpKind, needs_grad: bool) -> None:
    made = engine_op(op(kind), pass_body("r", 1, [[1, 2, 3], [4, 5]], loss_fn="ppo"))
    assert isinstance(made, Pass)
    assert (made.run, made.seq, made.loss_fn, made.needs_grad) == ("r", 1, "ppo", needs_grad)
    assert [datum.tokens.tolist() for datum in made.datums] == [[1, 2], [4]]
    assert [d.inputs["target_tokens"].tolist() for d in made.datums] == [[2, 3], [5]]
    assert [d.inputs["weights"].tolist() for d in made.datums] == [[1.0, 1.0], [1.0]]


def test_loss_settings_are_numbers_for_the_engine() -> None:
    request = wire_pb2.ForwardBackwardRequest(loss_fn_config={"clip": 0.2})
    request.loss_fn_config_v2["note"].text = "words"
    made = engine_op(op(OpKind.FORWARD), request.SerializeToString())
    assert isinstance(made, Pass)
    assert made.loss_config == {"clip": 0.2}


def test_an_optim_step_has_its_parameters() -> None:
    made = engine_op(op(OpKind.OPTIM_STEP), optim_body(lr=0.5))
    assert made == OptimStep("r", 1, 0.5, 0.9, 0.95, 1e-8, 0.0, 0.0)


def test_a_rejected_op_fails_with_the_refusal_of_the_api() -> None:
    body = Result.failed("rank must be…", "user").payload
    assert engine_op(op(OpKind.REJECTED), body) == Failure("rank must be…", "user")


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL])
def test_an_unreadable_body_fails_without_an_exception(kind: OpKind) -> None:
    made = engine_op(op(kind), b"\xff\xff")
    assert isinstance(made, Failure)
    assert made.category == "user"


def test_the_result_of_a_pass_has_its_logprobs_in_order_and_its_cycle() -> None:
    logprobs = [np.array([-1.5, -2.5], np.float32), np.zeros((3, 2), np.float32)]
    result = result_of(op(OpKind.FORWARD_BACKWARD), PassOutput(logprobs, loss_sum=4.0), cycle=7)
    assert result.kind is ResultKind.PASS
    output = decode_pass_output(result.payload)
    assert output.metrics == {"loss:sum": 4.0, CYCLE_METRIC: 7.0}
    assert [o["logprobs"].data for o in output.loss_fn_outputs] == [[-1.5, -2.5], [0.0] * 6]


def test_the_other_results_have_the_wire_format() -> None:
    step = result_of(op(OpKind.OPTIM_STEP), StepOutput(grad_norm=0.25), cycle=7)
    assert json.loads(step.payload) == {"metrics": {"grad_norm": 0.25, CYCLE_METRIC: 7.0}}
    create = result_of(op(OpKind.CREATE), CreateOutput(trainable_parameters=10), cycle=7)
    assert create.json() == {"model_id": "r", "type": "create_model"}
    load = result_of(op(OpKind.LOAD), LoadOutput("tinker://x"), cycle=7)
    assert load.json() == {"path": "tinker://x", "model_id": "r", "type": "load_weights"}
    failure = result_of(op(OpKind.FORWARD), Failure("No.", "server"), cycle=7)
    assert (failure.kind, failure.json()["category"]) == (ResultKind.FAILURE, "server")


SPEC = AdapterSpec(rank=2, seed=0)
PATH = "tinker://a:train:0/weights/x"
FIRST, SECOND = WeightsRef("a:train:0:3"), WeightsRef("a:train:0:4")


def weights_of(value: float) -> HostWeights:
    size = plan_layout(SPEC, [Target("model.q_proj", "attn", 16, 16)]).size
    return HostWeights(SPEC, torch.full((size,), value))


def load_body(*sources: LoadSource, optimizer: bool = False, lora: LoraSpec | None = None) -> bytes:
    return encode(LoadRequest(PATH, sources, optimizer, lora)).encode()


@pytest.mark.parametrize(
    ("kind", "has_optimizer"), [("weights", True), ("sampler_weights", False), ("external_weights", False)]
)
def test_a_training_checkpoint_includes_the_optimizer_state(kind: str, has_optimizer: bool) -> None:
    body = json.dumps({"name": "x", "kind": kind}).encode()
    assert engine_op(op(OpKind.SAVE), body) == Save("r", 1, optimizer=has_optimizer)


def test_a_save_with_an_invalid_recipient_fails() -> None:
    body = encode(SaveRequest(name="x", age_recipients=("age1nonsense",))).encode()
    expected = "age_encryption_recipients[0] is no age or SSH public key."
    assert engine_op(op(OpKind.SAVE), body) == Failure(expected, "user")


def test_an_upload_is_passed_to_the_engine_unchanged() -> None:
    lora = LoraSpec(rank=8, seed=7)
    upload = PeftAdapter(lora, (PeftModule("m", "m.A", "m.B", 2.0),), b"tensors")
    assert engine_op(op(OpKind.IMPORT, 0), encode_import(upload)) == Import(
        "r", 0, engine_ops.PeftAdapter(AdapterSpec(8, 7), [engine_ops.PeftModule("m", "m.A", "m.B", 2.0)], b"tensors")
    )


@pytest.mark.parametrize("body", [b"", b"CTI1\xff\xff\xff\xff{"], ids=["nothing", "no import"])
def test_an_unreadable_import_is_a_user_error(body: bytes) -> None:
    expected = Failure("The uploaded adapter cannot be read.", "user")
    assert engine_op(op(OpKind.IMPORT, 0), body) == expected


def test_a_load_has_the_saved_values() -> None:
    kept, state = Kept(), HostOptimizer(SPEC, torch.zeros(2), torch.ones(2), 5)
    kept.weights[FIRST], kept.optimizers[FIRST] = weights_of(1.0), state
    for optimizer in (True, False):
        made = engine_op(op(OpKind.LOAD), load_body(LoadSource(FIRST), optimizer=optimizer), kept)
        assert isinstance(made, Load)
        assert made.weights is kept.weights[FIRST]
        assert made.optimizer is (state if optimizer else None)
        assert (made.path, made.creates) == (PATH, False)
    first = engine_op(op(OpKind.LOAD, 0), load_body(LoadSource(FIRST), lora=LoraSpec(2, 0)), kept)
    assert isinstance(first, Load)
    assert first.creates


def test_several_sources_are_summed() -> None:
    kept = Kept()
    kept.weights = {FIRST: weights_of(1.0), SECOND: weights_of(2.0)}
    body = load_body(LoadSource(FIRST, 0.25), LoadSource(SECOND, 0.75), lora=LoraSpec(4, 0))
    made = engine_op(op(OpKind.LOAD, 0), body, kept)
    assert isinstance(made, Load)
    layout, mixed = layout_of(made.weights.spec), made.weights
    pair = layout.views(mixed.flat)["model.q_proj"]
    ours = mixed.spec.scale * pair.b @ pair.a
    each = SPEC.scale * torch.full((16, 2), 1.0) @ torch.full((2, 16), 1.0)
    torch.testing.assert_close(ours, 0.25 * each + 0.75 * 4 * each)


def test_a_load_of_a_missing_optimizer_state_fails() -> None:
    kept = Kept()
    kept.weights[FIRST], kept.optimizers[FIRST] = weights_of(1.0), None
    made = engine_op(op(OpKind.LOAD), load_body(LoadSource(FIRST), optimizer=True), kept)
    assert made == Failure(f"Checkpoint {PATH} has no optimizer state.", "user")


def test_a_load_with_unreadable_files_fails_alone() -> None:
    made = engine_op(op(OpKind.LOAD), load_body(LoadSource(FIRST)))
    assert made == Failure(f"Checkpoint {PATH} cannot be read on the server.", "server")


REF = WeightsRef("other:train:0:3")
WEIGHTS = HostWeights(AdapterSpec(2, 0), torch.zeros(0))
OP = QueuedOp(RunId("run"), 5, OpKind.REVERSE_KL, 10, "inline", 100, 0.0)
DATUM = KlArrays(np.array([1, 2]), np.array([3]), np.array([7, 8]), np.array([1.0, 0.5], np.float32))


def read(reference: WeightsRef | None, kept: Kept) -> Op | NoteOutput | Failure:
    return engine_op(OP, encode_reverse_kl(ReverseKlBody(reference, 0.5, (DATUM,))), kept)


@pytest.mark.parametrize(("reference", "weights"), [(REF, WEIGHTS), (None, None)])
def test_a_request_is_read_with_its_reference(reference: WeightsRef | None, weights: HostWeights | None) -> None:
    kept = Kept()
    kept.weights[REF] = WEIGHTS
    op = read(reference, kept)

    assert isinstance(op, ReverseKl)
    assert (op.run, op.seq, op.temperature) == ("run", 5, 0.5)
    assert op.reference is weights
    (datum,) = op.datums
    assert datum.tokens.tolist() == [1, 2, 7]
    assert datum.reference.tolist() == [3, 7]
    assert datum.weights.tolist() == [1.0, 0.5]


def test_a_missing_reference_is_a_server_error() -> None:
    assert read(REF, Kept()) == Failure("The weights of the reference cannot be read on the server.", "server")


def test_the_means_are_over_the_targets_with_a_weight() -> None:
    losses = [np.array([1.0, 0.0], np.float32), np.array([2.0], np.float32)]

    result = result_of(OP, ReverseKlOutput(losses, 3.0, 1.5, 2), cycle=4)

    assert result.json()["metrics"] == {
        "loss:sum": 3.0,
        "loss:mean": 1.5,
        "reverse_kl:mean": 0.75,
        "num_samples:sum": 2.0,
        "num_tokens:sum": 2.0,
        "clock_cycle:unique": 4.0,
    }


def test_without_weighted_targets_the_means_are_zero() -> None:
    output = ReverseKlOutput([np.zeros(1, np.float32)], 0.0, 0.0, 0)
    metrics = result_of(OP, output, cycle=4).json()["metrics"]
    assert (metrics["loss:mean"], metrics["reverse_kl:mean"]) == (0.0, 0.0)


REQUEST = RequestId("s:sample:0:1")
CLAIMED = ClaimedSample(
    REQUEST, TenantId("t"), SamplerId("s:sample:0"), None, BODY, accepted_at=0.0, starts=0, deaths=0
)
EOS = (7, 9)


def test_every_field_is_passed_to_the_decoder() -> None:
    body = replace(
        BODY, num_samples=3, max_tokens=None, temperature=0.5, top_k=4, top_p=0.9, seed=11,
        prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=1,
        prompt_logprobs_last_n=2, target_prompt_logprobs=TargetTokens.of(((1, -1), (2, 3))),
    )  # fmt: skip
    made = sample_request(replace(CLAIMED, weights=WeightsRef("r:1")), body, EOS)
    assert (made.id, made.tenant, made.weights) == (REQUEST, "t", "r:1")
    assert (made.num_samples, made.max_tokens) == (3, None)
    assert (made.temperature, made.top_k, made.top_p, made.seed) == (0.5, 4, 0.9, 11)
    assert (made.prompt_logprobs, made.prompt_logprobs_last_n) == (True, 2)
    assert (made.topk_prompt_logprobs, made.topk_sample_logprobs) == (2, 1)
    assert made.prompt.tolist() == list(BODY.prompt)
    assert made.prompt.dtype == np.int64
    assert made.target_prompt_logprobs is not None
    assert made.target_prompt_logprobs.tolist() == [[1, -1], [2, 3]]


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [(None, [7, 9], ()), ((), [], ()), ((3, 4), [3, 4, 7, 9], ()), (("a", "bc"), [7, 9], ("a", "bc"))],
)
def test_an_empty_stop_list_is_the_only_one_without_end_of_sequence(
    stop: tuple[str, ...] | tuple[int, ...] | None, tokens: list[int], strings: tuple[str, ...]
) -> None:
    made = sample_request(CLAIMED, replace(BODY, stop=stop), EOS)
    assert (sorted(made.stop_tokens), made.stop_strings) == (tokens, strings)


def test_a_default_seed_depends_only_on_the_request() -> None:
    unseeded = replace(BODY, seed=None)
    made = sample_request(CLAIMED, unseeded, EOS)
    assert made.seed == seed_of(REQUEST) == 8131979140669290372
    other = replace(CLAIMED, request=RequestId("s:sample:0:2"))
    assert made.seed != sample_request(other, unseeded, EOS).seed
    assert sample_request(CLAIMED, replace(BODY, seed=0), EOS).seed == 0


@pytest.mark.parametrize(("prompt", "targets"), [((1,), ()), ((1, 2), ((),))])
def test_targets_of_a_prompt_without_scored_tokens_are_a_matrix(
    prompt: tuple[int, ...], targets: tuple[tuple[int, ...], ...]
) -> None:
    body = replace(BODY, prompt=prompt, target_prompt_logprobs=TargetTokens.of(targets))
    made = sample_request(CLAIMED, body, EOS)
    assert made.target_prompt_logprobs is not None
    assert made.target_prompt_logprobs.shape == (len(prompt) - 1, 0)


def test_an_output_is_encoded_in_the_wire_format() -> None:
    sequence = SampledSequence(np.array([4, 7], np.int32), np.array([-1, -2], np.float32), "stop", None)
    claimed = replace(CLAIMED, weights=WeightsRef("r:1"))
    request = sample_request(claimed, replace(BODY, policy_step=5), EOS)
    output = SampleOutput([sequence], None, None, None, cached_prompt_tokens=2)
    result = sample_result(request, output)
    assert result.kind is ResultKind.SAMPLE
    response = wire_pb2.SampleResponse.FromString(result.payload)
    assert response.prompt_cache_hit_tokens == 2
    assert np.frombuffer(response.sequences[0].tokens, "<i4").tolist() == [4, 7]
    (span,) = response.sequences[0].policy_spans
    assert (span.start, span.end, span.training_run_id, span.step) == (0, 2, "r", 5)
    (base,) = decode_sample_response(
        sample_result(replace(request, weights=None, policy_step=None), output).payload
    ).sequences
    assert base.policy_spans == [PolicySpan(start=0, end=2)]
    assert base.policy_steps == [-1, -1]
