from __future__ import annotations

import inspect
import re
from pathlib import Path

from cotrain_store.keys import (
    age_keys,
    fleet_keys,
    result_keys,
    run_keys,
    sample_keys,
    tenant_keys,
    weights_keys,
)
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
from cotrain_store.redis_client import connection

KEY_FILES = (age_keys, fleet_keys, result_keys, run_keys, sample_keys, tenant_keys, weights_keys)
SCRIPTS = Path(connection.__file__).parent / "scripts"


def test_all_keys_of_a_pool_share_its_hash_tag() -> None:
    makers = {
        maker
        for file in KEY_FILES
        for _, maker in inspect.getmembers(file, inspect.isfunction)
        if "pool" in inspect.signature(maker).parameters and maker is not fleet_keys.hash_tag
    }
    assert len(makers) > 30
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
        start=fleet_keys.prefix(pool),
        names=[
            run_keys.log(pool, RunId(none)),
            run_keys.ops(pool, RunId(none)),
            run_keys.bodies(pool, RunId(none)),
            run_keys.digests(pool, RunId(none)),
            run_keys.unnumbered_ops(pool, RunId(none)),
            run_keys.queue(pool, TenantId(none)),
            fleet_keys.notify_worker(pool, WorkerId(none)),
            fleet_keys.worker(pool, WorkerId(none)),
            sample_keys.sample_load(pool, TenantId(none)),
            sample_keys.sample_ring(pool),
            sample_keys.waiting_samples(pool, none, TenantId(none)).removesuffix(":"),
            sample_keys.claimed_samples(pool, WorkerId(none)),
            sample_keys.cancelled_samples(pool, WorkerId(none)),
            weights_keys.pool_weights(pool),
            weights_keys.unstored_weights(pool, WorkerId(none)),
            weights_keys.content(pool, none),
            weights_keys.optimizer_content(pool, none),
            weights_keys.external_folders(pool),
            run_keys.ready(pool),
            run_keys.gaps(pool),
            fleet_keys.drops(pool, WorkerId(none)),
            fleet_keys.open_steps(pool, WorkerId(none)),
            sample_keys.last_claim(pool, WorkerId(none)),
            fleet_keys.workers(pool),
            run_keys.queue_tenants(pool),
        ],
    )
    of_all = {
        result_keys.result(RequestId(none)),
        sample_keys.sample(RequestId(none)),
        sample_keys.sampler(SamplerId(none)),
        weights_keys.weights(WeightsRef(none)),
        sample_keys.completions(SamplerId(none), 0).removesuffix(":0"),
        weights_keys.checkpoint(RunId(none), none, none).removesuffix("//"),
        tenant_keys.session(SessionId(none)),
        run_keys.run(RunId(none)),
        tenant_keys.tenant_runs(TenantId(none)).removesuffix(":runs"),
        tenant_keys.usage(TenantId(none), 0).removesuffix(":0"),
        result_keys.spool_segment_refs(),
        result_keys.spool_results(),
        age_keys.clock(),
        age_keys.ends(),
        weights_keys.published(),
        "cotrain:",  # before a hash tag
    }
    for script in SCRIPTS.glob("*.lua"):
        text = script.read_text()
        built = set(re.findall(r"(?:prefix|row\[3\]) \.\. '([a-z:_]+)'", text))
        assert built <= of_pool, script.name
        assert set(re.findall(r"'(cotrain:[a-z:]*)'", text)) <= of_all, script.name
    assert result_keys.result(RequestId("r:1")) == "cotrain:result:r:1"
    assert (
        weights_keys.weights_users(WeightsRef("w"))
        == weights_keys.weights(WeightsRef("w")) + ":users"
    )
    checkpoint = RunId("r"), "weights", "n"
    assert (
        weights_keys.pending_checkpoint(*checkpoint)
        == weights_keys.checkpoint(*checkpoint) + ":pending"
    )
    assert weights_keys.checkpoint(*checkpoint).endswith(
        ":" + weights_keys.checkpoint_member(*checkpoint)
    )
    assert weights_keys.run_checkpoints(RunId("r")) == run_keys.run(RunId("r")) + ":checkpoints"
    of_tenant = tenant_keys.tenant_runs(TenantId("t")).removesuffix("runs")
    for made_key, suffix in (
        (weights_keys.tenant_checkpoints, "checkpoints"),
        (weights_keys.expiring_checkpoints, "expiring"),
        (weights_keys.checkpoint_sizes, "checkpoint_sizes"),
        (weights_keys.unstored_checkpoints, "owed"),
        (result_keys.unread, "unread"),
        (result_keys.unread_until, "unread_until"),
        (tenant_keys.tenant_samplers, "samplers"),
        (tenant_keys.sampler_bytes, "sampler_bytes"),
    ):
        assert made_key(TenantId("t")) == of_tenant + suffix
    assert (
        tenant_keys.session_samplers(SessionId("s"))
        == tenant_keys.session(SessionId("s")) + ":samplers"
    )


def test_no_script_negates_a_number_the_way_redis_does_not_read() -> None:
    for script in SCRIPTS.glob("*.lua"):
        assert not re.search(r", -tonumber", script.read_text()), script.name
