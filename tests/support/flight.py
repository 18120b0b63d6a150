"""Cycles of a worker without a server: an engine, a recorder, and four tenants with every kind of request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from cotrain.wire.proto import wire_pb2
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, encode_reverse_kl
from cotrain_store.messages.ids import RunId, TenantId, WeightsRef, WorkerId, encode
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import (
    Failure,
    HostOptimizer,
    HostWeights,
    NoteOutput,
    Op,
    Output,
    SaveOutput,
    WeightsMissing,
)
from cotrain_workers.op_codec import engine_op
from cotrain_workers.recorder.recorder import SUFFIX, Recorder
from tests.support.bodies import optim_body, pass_body, sequences

TextRequest = tuple[str, int, OpKind, bytes]  # run, seq, kind, body

A, B, C, D = "ann:train:0", "bob:train:0", "cid:train:0", "dan:train:0"
CRASHED = Failure("Internal error: this request could not be run.", "server")


@dataclass
class Memory:
    """Saved weights, for later loads."""

    engine: Engine
    saves: dict[str, SaveOutput] = field(default_factory=dict)

    def host(self, ref: WeightsRef) -> HostWeights:
        if ref not in self.saves:
            raise WeightsMissing(ref)
        return self.saves[ref].weights

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        self.host(ref)
        return self.saves[ref].optimizer


class Flight:
    """Runner of cycles like the worker's loop, recorded in `folder`."""

    def __init__(self, engine: Engine, folder: Path, *, kept: int = 100, epoch: int = 1) -> None:
        self.engine = engine
        self.folder = folder
        self.memory = Memory(engine)
        folder.mkdir(parents=True, exist_ok=True)
        self.recorder = Recorder(engine, self.memory, folder, pool="pool", base_model="tiny", epoch=epoch, kept=kept)
        self.cycles = 0

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def cycle(
        self,
        *asked: TextRequest,
        crashed: Sequence[tuple[str, int]] = (),
        allowances: Mapping[tuple[str, int], int] | None = None,
    ) -> dict[str, Output]:
        """Run a cycle. Ops in `crashed` fail as if they had broken the engine. Return the outputs by request."""
        self.begin(*asked)
        runnable: list[Op] = []
        outputs: dict[tuple[str, int], Output] = {}
        for op in self.step.ops:
            request = engine_op(op, self.bodies[op.run, op.seq], self.memory, self.engine.adapters.layout_of)
            if op.id in crashed:
                outputs[op.run, op.seq] = CRASHED
            elif isinstance(request, Failure | NoteOutput):
                outputs[op.run, op.seq] = request
            else:
                runnable.append(request)
        outputs |= run_to_end(self.engine.cycle(runnable, allowances or {})).outputs
        for (run, seq), output in outputs.items():
            if isinstance(output, SaveOutput):
                self.memory.saves[f"{run}:{seq}"] = output
        self.recorder.finish(self.step, outputs)
        return {f"{run}:{seq}": output for (run, seq), output in outputs.items()}

    def begin(self, *asked: TextRequest) -> None:
        """Start a cycle, which looks like a crash unless it is finished."""
        self.cycles += 1
        ops = tuple(QueuedOp(RunId(run), seq, kind, 0, "inline", len(body), 0.0) for run, seq, kind, body in asked)
        tenants = {op.run: TenantId(op.run[:3]) for op in ops}
        self.step = Step(self.cycles, WorkerId("w0"), ops, 0.0, tenants)
        self.bodies: dict[tuple[str, int], bytes] = {(run, seq): body for run, seq, _, body in asked}
        self.recorder.begin(self.step, self.bodies)


def whole_story(flight: Flight) -> None:
    """Run four tenants through five cycles: every op, several losses, and one failure of every kind."""
    flight.cycle(create(A, rank=4), create(B, rank=2), a_pass(A, 1), a_pass(B, 1, "ppo"))
    flight.cycle(
        a_pass(A, 2, "importance_sampling"), a_step(A, 3), a_save(A, 4),
        a_pass(B, 2, kind=OpKind.FORWARD), a_step(B, 3),
        create(C, rank=2), a_pass(C, 1, "dro"), rejected(C, 2),
    )  # fmt: skip
    flight.cycle(
        a_pass(A, 5), a_step(A, 6),
        a_reverse_kl(B, 4, f"{A}:4"), a_step(B, 5),
        a_pass(C, 3, "cispo", advantage=float("nan")), a_step(C, 4),
    )  # fmt: skip
    flight.cycle(
        a_load(A, 7, [f"{A}:4"], optimizer=True), a_load(C, 5, ["nobody:train:0:1"]), a_pass(B, 6),
    )  # fmt: skip
    mixed = a_load(D, 0, [f"{A}:4", f"{A}:4"], lora=LoraSpec(rank=8, seed=1))
    flight.cycle(
        a_pass(A, 8), a_step(A, 9), a_pass(B, 7, "gspo"), a_pass(C, 6), a_step(C, 7), mixed,
        crashed=[(B, 7)],
    )  # fmt: skip


def create(run: str, rank: int) -> TextRequest:
    body = json.dumps(asdict(LoraSpec(rank=rank, seed=len(run) + rank))).encode()
    return run, 0, OpKind.CREATE, body


def a_step(run: str, seq: int) -> TextRequest:
    return run, seq, OpKind.OPTIM_STEP, optim_body(1e-2)


def a_save(run: str, seq: int) -> TextRequest:
    return run, seq, OpKind.SAVE, encode(SaveRequest(name="x", kind="weights")).encode()


def rejected(run: str, seq: int) -> TextRequest:
    body = json.dumps({"error": "datum 0: no tokens.", "category": "user"}).encode()
    return run, seq, OpKind.REJECTED, body


def a_load(
    run: str, seq: int, refs: list[str], *, optimizer: bool = False, lora: LoraSpec | None = None
) -> TextRequest:
    sources = tuple(LoadSource(WeightsRef(ref), 0.5 if len(refs) > 1 else 1.0) for ref in refs)
    return (run, seq, OpKind.LOAD, encode(LoadRequest("tinker://x", sources, optimizer, lora)).encode())


def a_reverse_kl(run: str, seq: int, reference: str) -> TextRequest:
    datum = KlArrays(np.array([1, 2]), np.array([3]), np.array([4, 5, 6]), np.ones(3, np.float32))
    body = encode_reverse_kl(ReverseKlBody(WeightsRef(reference), 1.0, (datum,)))
    return run, seq, OpKind.REVERSE_KL, body


def a_pass(
    run: str,
    seq: int,
    loss_fn: str = "cross_entropy",
    *,
    kind: OpKind = OpKind.FORWARD_BACKWARD,
    advantage: float = 1.0,
) -> TextRequest:
    """Return a pass over three sequences that depend only on run and seq."""
    drawn = sequences(seq * 1000 + ord(run[0]), 3, 7 + seq, vocab=32)
    request = wire_pb2.ForwardBackwardRequest.FromString(
        pass_body(run, seq, drawn, loss_fn=loss_fn, forward_only=kind is OpKind.FORWARD)
    )
    for datum in request.data:
        length = len(datum.loss_fn_inputs["weights"].dense) // 4
        if loss_fn != "cross_entropy":
            del datum.loss_fn_inputs["weights"]
            for name, value in policy_inputs(loss_fn, advantage).items():
                tensor = datum.loss_fn_inputs[name]
                tensor.dtype = wire_pb2.DTYPE_FLOAT32
                tensor.dense = np.full(length, value, "<f4").tobytes()
    return run, seq, kind, request.SerializeToString(deterministic=True)


def policy_inputs(loss_fn: str, advantage: float) -> dict[str, float]:
    """Return the inputs of a policy loss for every token."""
    mask = {"sequence_ratio_mask": 1.0} if loss_fn == "gspo" else {}
    return {"logprobs": -3.0, "advantages": advantage, **mask}
