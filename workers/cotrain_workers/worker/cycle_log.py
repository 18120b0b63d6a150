"""Log lines, metrics and trace spans of a cycle: its requests, and the ones that failed.

The log has the full id that a client sees (`RequestFailed.request_id`), so that grep finds it.

A cycle has one span with links to its ops, one for each of its parts, and one for each finished
op. The spans are made from recorded times after the commit. A worker that crashes leaves none, and
the process that re-executes the step reports it as its own.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import structlog
from opentelemetry.trace import Tracer

from cotrain_store.messages.ops import Step
from cotrain_store.monitoring.logs import log_requests
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.monitoring.traces import record, trace_id
from cotrain_store.tenants.catalog import TenantNames
from cotrain_workers.engine.ops import CycleOutput, Failure
from cotrain_workers.results import OpRow, StepCommit
from cotrain_workers.worker.device_time import CycleTimes

log = structlog.get_logger()


def log_cycle(step: Step, commit: StepCommit, names: TenantNames) -> None:
    """Write a committed cycle to the log, and its failures with the names of their tenants."""
    record = commit.record
    log_requests(
        log.info, "cycle_committed", [op.request_id for op in step.ops], cycle=step.cycle,
        runs=len(record["runs"]), ops=len(commit.results), tokens=record["tokens"],
        forwards=record["forwards"], dur_ms=record["duration_ms"],
    )  # fmt: skip
    failed = [(row.op, row.output) for row in commit.rows if isinstance(row.output, Failure)]
    if not failed:
        return
    # In one call: a tenant without a name is queried each time.
    name_by_tenant = names.of({step.tenant_by_run[op.run] for op, _ in failed})
    for op, output in failed:
        tenant = step.tenant_by_run[op.run]
        # Omit the reason of a tenant's error, because it would quote the tenant's data.
        reason = output.message if output.category == "server" else None
        log.warning(
            "request_failed", request=op.request_id, run=op.run, seq=op.seq, tenant=tenant,
            tenant_name=name_by_tenant.get(tenant, ""), kind=op.kind.value, cycle=step.cycle,
            category=output.category, reason=reason,
        )  # fmt: skip


def count_cycle(metrics: WorkerMetrics, step: Step, commit: StepCommit) -> None:
    """Count a committed cycle, each op that it resolved, and the device time by tenant."""
    now = time.time()
    metrics.cycle_duration.observe(commit.record["duration_ms"] / 1000)
    for row in commit.rows:
        save = commit.saves.get(row.op.id)
        if row.output is not None and not (save and save.is_named):  # its answer follows
            metrics.resolved(row.op.kind, now - row.op.accepted_at)
    for run, used in commit.usage.items():
        metrics.used_device(step.tenant_by_run[run], used.device_s)


def bound_to_cycle(step: Step) -> AbstractContextManager[Any]:
    """Return a context in which every log line has this cycle, and its trace id if there is one."""
    fields: dict[str, Any] = {"cycle": step.cycle}
    if step.trace:
        fields["trace_id"] = trace_id(step.trace)
    return structlog.contextvars.bound_contextvars(**fields)


def trace_cycle(
    tracer: Tracer, step: Step, cost: CycleOutput | None, commit: StepCommit, times: CycleTimes, crashes: int
) -> None:
    """Record a committed cycle. Ops without a traced request are omitted; without any, so is the cycle."""
    traced = [row for row in commit.rows if row.op.trace]
    if not traced:
        return
    ended = time.time()
    facts = commit.record
    cycle = record(
        tracer, "cycle", times.began, ended, step.trace, links=[row.op.trace for row in traced],
        cycle=step.cycle, worker=step.worker, outcome=facts["outcome"], crashes=crashes,
        runs=len(facts["runs"]), ops=len(commit.results), tokens=facts["tokens"],
        wave_s=cost.wave_s if cost else None, optim_s=cost.optim_s if cost else None,
        sampling_s=(facts["sampling_ms"] or 0.0) / 1000,
    )  # fmt: skip
    for part in times.parts(cost):
        record(tracer, part.name, part.began, part.ended, cycle)
    for row in traced:
        op = row.op
        if row.output is not None:
            record(
                tracer, op.kind.value, op.accepted_at, ended, op.trace, links=[cycle],
                failed=isinstance(row.output, Failure), **_facts(row, step, commit),
            )  # fmt: skip


def _facts(row: OpRow, step: Step, commit: StepCommit) -> Mapping[str, Any]:
    """Return names and numbers of an op. They contain nothing that its tenant wrote."""
    op, output = row.op, row.output
    return {
        "request": op.request_id,
        "run": op.run,
        "seq": op.seq,
        "tenant": step.tenant_by_run[op.run],
        "cycle": step.cycle,
        "tokens": op.tokens,
        "waited_s": max(0.0, step.planned_at - op.accepted_at),
        "failure": output.category if isinstance(output, Failure) else None,
        # A named save resolves once its weights are on disk, which is later.
        "is_stored_later": row.op.id in commit.saves or None,
    }
