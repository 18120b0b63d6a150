"""File format of a recorded cycle: its inputs and its outcome. A replay needs only the base model and this file.

The file is an uncompressed zip archive of JSON and safetensors, without executable content:

* `cycle.json`: the plan, the base model, the numerics
* `bodies/<n>`: the body of the plan's n-th op
* `before/<n>.safetensors`: a run's state before the cycle (`state_files.encode_snapshot`)
* `weights/<n>.safetensors`: weights that a load or a reverse KL read
* `optimizers/<n>.safetensors`: the optimizer state that a load read
* `outcome.json`: fingerprints of every op's output, and of every run's state after the cycle
* `outcome.safetensors`: the numbers in those fingerprints, such as log-probs

The outcome is added at the end of the cycle. A cycle during which the process ended has none.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors import numpy as arrays
from safetensors import torch as tensors

from cotrain_store.bodies.adapter_bodies import LoadRequest
from cotrain_store.bodies.reverse_kl_body import decode_reverse_kl
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import RunId, WeightsRef
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_workers.checkpoints.state_files import decode_snapshot, encode_snapshot
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.facts import Numerics
from cotrain_workers.engine.ops import HostOptimizer, HostWeights, WeightsMissing
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.fingerprints import ArenaPrint, Fingerprint

FORMAT = "cotrain-cycle-1"
#: Exceptions of Python's readers for a damaged file. They raise RuntimeError for content that is encrypted,
#: compressed in an unknown way, or nested too deep.
_READ_ERRORS = (
    OSError, EOFError, zipfile.BadZipFile, zlib.error, SafetensorError, ValueError, KeyError,
    TypeError, AttributeError, RuntimeError,
)  # fmt: skip


class RecordingUnreadable(Exception):
    """The file is not a recorded cycle, or is damaged."""


@dataclass(frozen=True)
class CycleFacts:
    """Identity of a cycle, and its worker's model and numerics."""

    recorded_at: float
    pool: str
    base_model: str  # name used by clients
    model: str  # hub id or folder that the worker loaded
    numerics: Numerics
    step: Step


@dataclass(frozen=True)
class ReadCheckpoints:
    """Checkpoints that the ops of a cycle have read, by the reference of their weights."""

    weights: Mapping[str, HostWeights] = field(default_factory=dict)
    optimizers: Mapping[str, HostOptimizer | None] = field(default_factory=dict)

    def host(self, ref: WeightsRef) -> HostWeights:
        """Return weights. Raises WeightsMissing if they were missing in the recorded cycle."""
        if ref not in self.weights:
            raise WeightsMissing(ref)
        return self.weights[ref]

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        """Return the optimizer state that was saved with weights, or None. Raises WeightsMissing."""
        if ref not in self.optimizers:
            raise WeightsMissing(ref)
        return self.optimizers[ref]


#: Outcome of a cycle: fingerprints of its finished ops by run and seq, then of each run's state after it, by run and
#: None.
Findings: TypeAlias = Mapping[tuple[str, int | None], Fingerprint]


@dataclass(frozen=True)
class RecordedCycle:
    """Content of a file with a cycle."""

    facts: CycleFacts
    bodies: Sequence[bytes]  # bodies in the order of the plan's ops
    before: Mapping[RunId, AdapterState]
    """State before the cycle of each run that the cycle did not create."""
    read: ReadCheckpoints
    found: Findings | None  # None if the process crashed during the cycle


def only_run(cycle: RecordedCycle, run: RunId) -> RecordedCycle:
    """Return the part of a cycle that belongs to one run.

    It gives the same results, because these do not depend on other runs. On a GPU the last bits may differ.
    Raises ValueError for a run that is not in it.
    """
    step = cycle.facts.step
    if run not in step.tenant_by_run:
        raise ValueError(f"Run {run} is not in this cycle.")
    kept = [(op, body) for op, body in zip(step.ops, cycle.bodies, strict=True) if op.run == run]
    refs = {ref for op, body in kept for ref, _ in checkpoints_of(op, body)}
    ops, tenants = tuple(op for op, _ in kept), {run: step.tenant_by_run[run]}
    return RecordedCycle(
        replace(cycle.facts, step=replace(step, ops=ops, tenant_by_run=tenants)),
        [body for _, body in kept],
        {name: state for name, state in cycle.before.items() if name == run},
        ReadCheckpoints(
            {ref: weights for ref, weights in cycle.read.weights.items() if ref in refs},
            {ref: optimizer for ref, optimizer in cycle.read.optimizers.items() if ref in refs},
        ),
        cycle.found and {at: each for at, each in cycle.found.items() if at[0] == run},
    )


def checkpoints_of(op: QueuedOp, body: bytes) -> list[tuple[WeightsRef, bool]]:
    """Return the weights that an op reads, each with True if the op also reads their optimizer state."""
    if not body:
        return []
    if op.kind is OpKind.LOAD:
        request = LoadRequest.parse(body)
        return [(source.ref, request.optimizer) for source in request.sources]
    if op.kind is OpKind.REVERSE_KL:
        try:
            reference = decode_reverse_kl(body).reference
        except MalformedBody:
            return []
        return [(reference, False)] if reference else []
    return []


def write_inputs(
    path: Path,
    facts: CycleFacts,
    bodies: Iterable[bytes],
    before: Iterable[tuple[RunId, AdapterState]],
    read: ReadCheckpoints,
) -> None:
    """Write the inputs of a cycle. `before` is consumed one state at a time, because each may be large.

    The file appears atomically. Only its owner can read it, because it holds the tenants' data and weights.
    """
    unfinished = path.with_suffix(".tmp")
    unfinished.touch(mode=0o600)
    with zipfile.ZipFile(unfinished, "w") as archive:
        archive.writestr("cycle.json", json.dumps(_facts_json(facts, read)))
        for at, body in enumerate(bodies):
            archive.writestr(f"bodies/{at}", body)
        for at, (run, state) in enumerate(before):
            seq = min(op.seq for op in facts.step.ops if op.run == run) - 1
            content = encode_snapshot(run, seq, facts.numerics.id, state)
            archive.writestr(f"before/{at}.safetensors", content)
        for at, weights in enumerate(read.weights.values()):
            archive.writestr(f"weights/{at}.safetensors", tensors.save({"flat": weights.flat}))
        for at, optimizer in enumerate(read.optimizers.values()):
            if optimizer:
                moments = {"m": optimizer.m, "v": optimizer.v}
                archive.writestr(f"optimizers/{at}.safetensors", tensors.save(moments))
    unfinished.rename(path)


def add_findings(path: Path, found: Findings) -> None:
    """Add the outcome of a cycle. A crash during the write leaves a damaged file."""
    with zipfile.ZipFile(path, "a") as archive:
        numbers = {
            f"{at}/{name}": values
            for at, fingerprint in enumerate(found.values())
            for name, values in fingerprint.numbers.items()
        }
        archive.writestr("outcome.safetensors", arrays.save(numbers))
        archive.writestr("outcome.json", json.dumps(_findings_json(found)))


def write_cycle(path: Path, cycle: RecordedCycle) -> None:
    """Write a recorded cycle, or the part of one that `only_run` returns."""
    write_inputs(path, cycle.facts, cycle.bodies, cycle.before.items(), cycle.read)
    if cycle.found is not None:
        add_findings(path, cycle.found)


def read_cycle(path: Path) -> RecordedCycle:
    """Read a recorded cycle.

    Raises:
        RecordingUnreadable: with the reason as a sentence.
    """
    with _opened(path) as archive:
        return _read(archive, path)


def read_facts(path: Path) -> CycleFacts:
    """Read the facts of a recorded cycle, without its tensors. Raises RecordingUnreadable."""
    with _opened(path) as archive:
        return _parse_facts(_json(archive, "cycle.json"), path)


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _READ_ERRORS as error:
        raise RecordingUnreadable(f"{path} cannot be read: {error}") from error


def _read(archive: zipfile.ZipFile, path: Path) -> RecordedCycle:
    raw = _json(archive, "cycle.json")
    facts = _parse_facts(raw, path)
    names = [name for name in archive.namelist() if name.startswith("before/")]
    states = [decode_snapshot(archive.read(name)) for name in names]
    return RecordedCycle(
        facts,
        [archive.read(f"bodies/{at}") for at in range(len(facts.step.ops))],
        {RunId(header["run"]): state for header, state in states},
        ReadCheckpoints(_weights(archive, raw["weights"]), _optimizers(archive, raw["optimizers"])),
        _findings(archive) if "outcome.json" in archive.namelist() else None,
    )


def _weights(archive: zipfile.ZipFile, spec_by_ref: Mapping[str, Any]) -> dict[str, HostWeights]:
    return {
        ref: HostWeights(AdapterSpec(**spec), **tensors.load(archive.read(f"weights/{at}.safetensors")))
        for at, (ref, spec) in enumerate(spec_by_ref.items())
    }


def _optimizers(archive: zipfile.ZipFile, facts_by_ref: Mapping[str, Any]) -> dict[str, HostOptimizer | None]:
    optimizers: dict[str, HostOptimizer | None] = {}
    for at, (ref, facts) in enumerate(facts_by_ref.items()):
        optimizers[ref] = facts and HostOptimizer(
            spec=AdapterSpec(**facts["spec"]),
            step=facts["step"],
            **tensors.load(archive.read(f"optimizers/{at}.safetensors")),
        )
    return optimizers


def _findings(archive: zipfile.ZipFile) -> Findings:
    raw = _json(archive, "outcome.json")
    numbers = arrays.load(archive.read("outcome.safetensors"))
    found = {}
    for at, row in enumerate([*raw["ops"], *raw["runs"]]):
        own = {name: numbers[f"{at}/{name}"] for name in row["numbers"]}
        arenas = {name: ArenaPrint(**arena) for name, arena in row["arenas"].items()}
        found[row["run"], row.get("seq")] = Fingerprint(row["said"], row["is_accident"], own, arenas)
    return found


def _findings_json(found: Findings) -> dict[str, Any]:
    ops, runs = [], []
    for (run, seq), fingerprint in found.items():
        row = {
            "said": fingerprint.text,
            "is_accident": fingerprint.is_accident,
            "numbers": list(fingerprint.numbers),
            "arenas": {name: asdict(arena) for name, arena in fingerprint.arenas.items()},
        }
        if seq is None:
            runs.append({"run": run, **row})
        else:
            ops.append({"run": run, "seq": seq, **row})
    return {"ops": ops, "runs": runs}


def _facts_json(facts: CycleFacts, read: ReadCheckpoints) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **asdict(facts),
        "weights": {ref: weights.spec.stored() for ref, weights in read.weights.items()},
        "optimizers": {
            ref: optimizer and {"spec": optimizer.spec.stored(), "step": optimizer.step}
            for ref, optimizer in read.optimizers.items()
        },
    }


def _parse_facts(raw: Mapping[str, Any], path: Path) -> CycleFacts:
    if raw["format"] != FORMAT:
        raise RecordingUnreadable(f"{path} is of format {raw['format']}; this version reads {FORMAT}.")
    given = {each.name: raw[each.name] for each in fields(CycleFacts)}
    given |= {"numerics": Numerics(**raw["numerics"]), "step": Step.parse(json.dumps(raw["step"]))}
    return CycleFacts(**given)


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    return json.loads(archive.read(name))
