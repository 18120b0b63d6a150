"""Response time and size of each page, with 10,000 runs of 1,000 tenants.

    python -m bench pages

The store is a real Redis filled with records in the server's format; the API runs in this process. Each page is
requested REPEATS times over ASGI. Prints the first response time, the slowest of the others, and the minimum CPU time
of this process, which depends little on other load. Redis runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from typing import Any

from bench.support.record import Args, Options, Report, show
from cotrain_server.ui.router import PAGES
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, SessionId, TenantId, encode
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_store.redis_client.connection import SyncConnection, open_sync_connection
from cotrain_store.tenants.history import POINT
from cotrain_store.usage import minute_of, usage_field, usage_hour
from tests.support.http_api import ADMIN_KEY, ALICE, POOL, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.ui import log_in

OPTIONS: Options = {}
TENANTS, RUNS_OF_EACH, RUNS_PER_CYCLE, CYCLES, REPEATS = 1_000, 10, 40, 200, 5


def fill(connection: SyncConnection, now: float) -> None:
    """Write the data of 10,000 runs: records, logs, points, usage, minutes, cycles."""
    runs = []
    for number in range(TENANTS):
        tenant = TenantId(f"t-{number:016x}")
        pipeline = connection.pipeline(transaction=False)
        pipeline.hset(redis_keys.tenant_names(), tenant, f"tenant {number}")
        pipeline.sadd(redis_keys.queue_tenants(POOL.id), tenant)
        pipeline.hset(redis_keys.queue(POOL.id, tenant), mapping={"ops": 3, "tokens": 900, "bytes": 9})
        for each in range(RUNS_OF_EACH):
            session = SessionId(f"{number:016x}{each:016x}")
            run = RunId(f"{session}:train:0")
            at = now - 60 * (number * RUNS_OF_EACH + each)
            named = {"name": f"experiment {each}"}
            record = RunRecord(run, tenant, session, POOL.id, POOL.base_model, LoraSpec(16, 1), at, named)
            runs.append((tenant, run))
            pipeline.hset(redis_keys.run(run), mapping={"record": encode(record)})
            log = {"state": "live", "tenant": tenant, "next": 62, "done": 60, "last": 63, "worker": "w0"}
            pipeline.hset(redis_keys.log(POOL.id, run), mapping=log)
            for key in (redis_keys.training_runs(tenant), redis_keys.all_training_runs()):
                pipeline.zadd(key, {run: at})
            points = [POINT.pack(n, n, 2 * n, at + n, 2.0, 1.0, 0.5, 1e-4, 100, 100 * n, 1, *[0.0] * 9) for n in (1, 2)]
            pipeline.rpush(redis_keys.steps(run), *points)
            field = usage_field("device_s", POOL.base_model, run)
            pipeline.hset(redis_keys.usage(tenant, usage_hour(now)), field, 1.5)
        for back in range(60):
            minute = redis_keys.minute(POOL.id, minute_of(now) - 60 * back)
            pipeline.hset(minute, mapping={f"device_s|{tenant}": 0.05, f"tokens|{tenant}": 900})
        pipeline.execute()
    whole = connection.pipeline(transaction=False)
    for number in range(CYCLES):
        first = number * RUNS_PER_CYCLE
        part = [runs[(first + each) % len(runs)] for each in range(RUNS_PER_CYCLE)]
        cycle = {
            "cycle": number + 1, "worker": "w0", "planned_at": now - 2 * (CYCLES - number),
            "started_at": now - 2 * (CYCLES - number), "duration_ms": 1800.0, "wave_ms": 1500.0,
            "optim_ms": 200.0, "sampling_ms": 50.0, "tokens": 300 * RUNS_PER_CYCLE,
            "padded_tokens": 320 * RUNS_PER_CYCLE, "forwards": 4, "outcome": "ok",
            "runs": [
                {"run": run, "tenant": tenant, "tokens": 300, "ops": {"forward_backward": 1, "optim_step": 1},
                 "failed": 0, "digests": {"60": "d" * 32, "61": "e" * 32}}
                for tenant, run in part
            ],
        }  # fmt: skip
        whole.lpush(redis_keys.cycles(POOL.id), json.dumps(cycle))
    whole.execute()


async def measure(api: Api, key: str) -> list[dict[str, Any]]:
    """Request each page that the owner of this key can see; return times and sizes."""
    await log_in(api.http, key)
    newest = (await api.http.get("/ui/runs.json")).json()["runs"]
    paths = [page.path for page in PAGES if "{" not in page.path]
    if newest:
        paths.append(f"/ui/runs/{newest[0]['run']}")
    rows = []
    for path in paths:
        wall_ms, cpu_ms, sizes = list[float](), list[float](), list[int]()
        for _ in range(REPEATS):
            cpu, wall = time.process_time(), time.perf_counter()
            answer = await api.http.get(path)
            wall_ms.append(1000 * (time.perf_counter() - wall))
            cpu_ms.append(1000 * (time.process_time() - cpu))
            sizes += [len(answer.content)] if answer.status_code == 200 else []
        if sizes:
            name = path if len(path) < 30 else "/ui/runs/<run>"
            times = {"first_ms": wall_ms[0], "others_at_most_ms": max(wall_ms[1:]), "cpu_ms": min(cpu_ms)}
            rows.append(show({"page": name, **times, "kb": sizes[-1] / 1000}))
    return rows


def run(_: Args, report: Report) -> None:
    asyncio.run(measure_all(report))


async def measure_all(report: Report) -> None:
    with EmbeddedRedis() as redis, closing(open_sync_connection(redis.url)) as connection:
        fill(connection, time.time())
        for name, key in (("operator", ADMIN_KEY), ("a tenant", ALICE)):
            async with running_api(redis.url) as api:
                print(f"--- as {name}")
                report[name] = await measure(api, key)
