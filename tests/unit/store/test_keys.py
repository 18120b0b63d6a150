from __future__ import annotations

import inspect
import re
from pathlib import Path

from cotrain_store import connection, keys
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    SamplerId,
    SessionId,
    TenantId,
    WeightsRef,
    WorkerId,
)

SCRIPTS = Path(connection.__file__).parent / "scripts"


def test_all_keys_of_a_pool_share_its_hash_tag() -> None:
    makers = [
        maker
        for _, maker in inspect.getmembers(keys, inspect.isfunction)
        if "pool" in inspect.signature(maker).parameters and maker is not keys.hash_tag
    ]
    assert len(makers) > 10
    for maker in makers:
        places = inspect.signature(maker).parameters
        assert maker(*(PoolId("p") if name == "pool" else "x" for name in places)).startswith(
            "cotrain:{p}:"
        )


def made(*, start: str, names: list[str]) -> set[str]:
    return {name.removeprefix(start) for name in names}


def test_the_scripts_build_only_keys_that_are_made_here() -> None:
    pool, none = PoolId("p"), ""
    of_pool = made(
        start=keys.prefix(pool),
        names=[
            keys.log(pool, RunId(none)),
            keys.ops(pool, RunId(none)),
            keys.bodies(pool, RunId(none)),
            keys.queue(pool, TenantId(none)),
            keys.notify_worker(pool, WorkerId(none)),
            keys.worker(pool, WorkerId(none)),
            keys.sample_load(pool, TenantId(none)),
            keys.sample_ring(pool),
            keys.waiting_samples(pool, none, TenantId(none)).removesuffix(":"),
            keys.claimed_samples(pool, WorkerId(none)),
            keys.cancelled_samples(pool, WorkerId(none)),
            keys.pool_weights(pool),
            keys.unstored_weights(pool, WorkerId(none)),
            keys.content(pool, none),
            keys.optimizer_content(pool, none),
            keys.external_folders(pool),
            keys.ready(pool),
            keys.gaps(pool),
            keys.drops(pool, WorkerId(none)),
            keys.open_steps(pool, WorkerId(none)),
            keys.last_claim(pool, WorkerId(none)),
            keys.workers(pool),
            keys.queue_tenants(pool),
        ],
    )
    of_all = {
        keys.result(RequestId(none)),
        keys.sample(RequestId(none)),
        keys.sampler(SamplerId(none)),
        keys.weights(WeightsRef(none)),
        keys.completions(SamplerId(none), 0).removesuffix(":0"),
        keys.checkpoint(RunId(none), none, none).removesuffix("//"),
        keys.session(SessionId(none)),
        keys.run(RunId(none)),
        keys.tenant_runs(TenantId(none)).removesuffix(":runs"),
        keys.usage(TenantId(none), 0).removesuffix(":0"),
        keys.spool_segment_refs(),
        keys.published(),
        "cotrain:",  # before a hash tag
    }
    for script in SCRIPTS.glob("*.lua"):
        text = script.read_text()
        built = set(re.findall(r"(?:prefix|row\[3\]) \.\. '([a-z:_]+)'", text))
        assert built <= of_pool, script.name
        assert set(re.findall(r"'(cotrain:[a-z:]*)'", text)) <= of_all, script.name
    assert keys.result(RequestId("r:1")) == "cotrain:result:r:1"
    assert keys.weights_users(WeightsRef("w")) == keys.weights(WeightsRef("w")) + ":users"
    checkpoint = RunId("r"), "weights", "n"
    assert keys.pending_checkpoint(*checkpoint) == keys.checkpoint(*checkpoint) + ":pending"
    assert keys.checkpoint(*checkpoint).endswith(":" + keys.checkpoint_member(*checkpoint))
    assert keys.run_checkpoints(RunId("r")) == keys.run(RunId("r")) + ":checkpoints"
    of_tenant = keys.tenant_runs(TenantId("t")).removesuffix("runs")
    for made_key, suffix in (
        (keys.tenant_checkpoints, "checkpoints"),
        (keys.expiring_checkpoints, "expiring"),
        (keys.checkpoint_sizes, "checkpoint_sizes"),
        (keys.owed_checkpoints, "owed"),
        (keys.unread, "unread"),
        (keys.unread_until, "unread_until"),
        (keys.tenant_samplers, "samplers"),
    ):
        assert made_key(TenantId("t")) == of_tenant + suffix
    assert keys.session_samplers(SessionId("s")) == keys.session(SessionId("s")) + ":samplers"


def test_no_script_negates_a_number_the_way_redis_does_not_read() -> None:
    for script in SCRIPTS.glob("*.lua"):
        assert not re.search(r", -tonumber", script.read_text()), script.name
