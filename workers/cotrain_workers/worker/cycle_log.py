"""What a worker's log and metrics say of a cycle: whose requests were in it, and which of them failed.

By the id that a client knows (`RequestFailed.request_id`), in full, so that grep finds it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog

from cotrain_store.monitoring.logs import log_requests
from cotrain_workers.engine.ops import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.messages.ids import RequestId
    from cotrain_store.messages.ops import Step
    from cotrain_store.monitoring.worker_metrics import WorkerMetrics
    from cotrain_store.tenants.names import TenantNames
    from cotrain_workers.engine.ops import Output
    from cotrain_workers.worker.step_commit import StepCommit

log = structlog.get_logger()


def log_cycle(
    step: Step,
    requests: Sequence[RequestId],
    outputs: Mapping[tuple[str, int], Output],
    record: Mapping[str, Any],
    names: TenantNames,
) -> None:
    """Write down a committed cycle of these `requests`, and its failures with the names of their tenants."""
    log_requests(
        log.info, "cycle_committed", requests, cycle=step.cycle,
        runs=len(record["runs"]), ops=len(outputs), tokens=record["tokens"],
        forwards=record["forwards"], dur_ms=record["duration_ms"],
    )  # fmt: skip
    failed = [
        (op, request, output)
        for op, request in zip(step.ops, requests, strict=True)
        if isinstance(output := outputs.get((op.run, op.seq)), Failure)
    ]
    if not failed:
        return
    # At once: one that has no name is asked for each time.
    name_by_tenant = names.of({step.tenant_by_run[op.run] for op, _, _ in failed})
    for op, request, output in failed:
        tenant = step.tenant_by_run[op.run]
        # Not what is wrong with what a tenant sent: that would quote it.
        reason = output.message if output.category == "server" else None
        log.warning(
            "request_failed", request=request, run=op.run, seq=op.seq, tenant=tenant,
            tenant_name=name_by_tenant.get(tenant, ""), kind=op.kind.value, cycle=step.cycle,
            category=output.category, reason=reason,
        )  # fmt: skip


def count_cycle(metrics: WorkerMetrics, step: Step, commit: StepCommit) -> None:
    """Count a committed cycle, each op that it resolved, and whose work took what of the device."""
    now = time.time()
    metrics.cycle_duration.observe(commit.record["duration_ms"] / 1000)
    for op in step.ops:
        save = commit.saves.get((op.run, op.seq))
        if (op.run, op.seq) in commit.results and not (
            save and save.is_named
        ):  # its answer follows
            metrics.resolved(op.kind, now - op.accepted_at)
    for run, used in commit.usage.items():
        metrics.used_device(step.tenant_by_run[run], used.device_s)
