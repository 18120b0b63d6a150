"""The operator's pages: tenants, workers, audit, settings, and the forms on them."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict, replace
from urllib.parse import quote

from cotrain_server.administration import DAYS_SHOWN, TenantChange, change_tenant
from cotrain_server.ui.pages.administration import shown
from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId, request_id
from cotrain_store.results.pending import Pending
from tests.support.http_api import ADMIN_KEY, ALICE, BOB, OPERATOR, POOL, Api
from tests.support.ui import FROM_HERE, log_in, log_out, send

PAGES = ("/ui/tenants", "/ui/workers", "/ui/audit", "/ui/settings")
RESTORING = {"runs_done": 3, "runs": 12, "ops_done": 41, "ops": 200}
RESTORED = "restoring: 3 of 12 runs, 41 of 200 ops"
HOSTILE = '<img src=x onerror="alert(1)">'


async def tenant_of(api: Api, key: str = ALICE) -> str:
    return (await api.services.tenants.authenticate(key)).id


async def twin(api: Api, path: str) -> dict[str, object]:
    answer = await api.http.get(f"{path}.json", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


async def test_to_a_tenant_none_of_these_pages_and_forms_exist(api: Api) -> None:
    tenant = await tenant_of(api)
    await log_in(api.http, ALICE)
    for path in (*PAGES, f"/ui/tenants/{tenant}"):
        assert (await api.http.get(path)).status_code == 404
        assert path not in (await api.http.get("/ui")).text
        answer = await api.http.get(f"{path}.json", headers={"X-API-Key": BOB})
        assert answer.status_code == 404
    for path in (f"/ui/tenants/{tenant}/pause", "/ui/tenants", f"/ui/workers/{POOL.id}/w0/drain"):
        assert (await send(api.http, path, {"name": "x"})).status_code == 404
    assert not (await api.services.audit.page(None, None, 10))


async def test_a_tenant_is_changed_from_its_page_and_a_form_of_another_site_changes_nothing(api: Api) -> None:
    tenant = await tenant_of(api)
    page = f"/ui/tenants/{tenant}"
    await log_in(api.http, ADMIN_KEY)
    foreign = await api.http.post(f"{page}/pause", data={"reason": "x"}, headers={"Sec-Fetch-Site": "cross-site"})
    assert foreign.status_code == 403
    for act, fields in (
        ("pause", {"reason": HOSTILE}),
        ("limits", {"ops": "7", "runs": "", "run_bytes": " 1000 "}),
        ("weight", {"weight": "2.5"}),
    ):
        answer = await send(api.http, f"{page}/{act}", fields)
        assert (answer.status_code, answer.headers["location"]) == (303, page), answer.text
    found = (await twin(api, page))["tenant"]
    assert isinstance(found, dict)
    assert (found["weight"], found["paused"]["reason"]) == (2.5, HOSTILE)
    own = {quota["name"]: quota["limit"] for quota in found["quotas"] if quota["is_own"]}
    assert own == {"ops": 7, "run_bytes": 1000}
    shown_page = (await api.http.get(page)).text
    assert HOSTILE not in shown_page
    assert html.escape(HOSTILE, quote=True).replace("&quot;", "&#34;") in shown_page
    for act, fields, says in (
        ("limits", {"ops": "-1"}, "limits.ops: Input should be a valid integer"),
        ("limits", {"ops": "0"}, "limits.ops: Input should be greater than or equal to 1"),
        ("weight", {"weight": "99"}, "weight: Input should be less than or equal to 10"),
        ("pause", {"reason": "x" * 201}, "reason: String should have at most 200 characters"),
        ("keys", {"name": "x", "days": "nan"}, "days: "),
    ):
        answer = await send(api.http, f"{page}/{act}", fields)
        assert (answer.status_code, says in answer.text) == (400, True), answer.text
    assert (await send(api.http, f"{page}/resume", {})).status_code == 303
    assert (await send(api.http, "/ui/tenants/t-none/resume", {})).status_code == 404


async def test_the_operator_chooses_a_tenant_by_its_name(api: Api) -> None:
    tenant = await tenant_of(api)
    await log_in(api.http, ADMIN_KEY)
    for path in ("/ui/runs", "/ui/checkpoints", "/ui/playground"):
        page = (await api.http.get(path)).text
        assert f"""<option value="{tenant}">""" in page, re.findall("<option.*?>.*?<", page)
    asked = {
        "tenant": tenant, "model-0": "tinker://r:train:0/sampler_weights/a", "prompt": "a",
        "max_tokens": "4", "temperature": "1", "seed": "0",
    }  # fmt: skip
    answers = await send(api.http, "/ui/playground", asked)
    assert answers.status_code == 200
    assert "not found" in answers.text  # the tenant has no such checkpoint
    (read,) = await api.services.audit.page(TenantId(tenant), None, 10)
    assert (read.event, read.details["tinker_path"]) == ("checkpoint_read", asked["model-0"])
    assert (await send(api.http, "/ui/playground", {**asked, "tenant": "t-no"})).status_code == 404
    assert (await api.http.get("/ui/playground?tenant=t-no")).status_code == 404


async def test_a_tenant_sees_its_own_limits_and_use_and_the_operator_has_no_such_page(api: Api) -> None:
    tenant = await tenant_of(api)
    await change_tenant(api.services, TenantId(tenant), TenantChange.model_validate({"limits": {"sessions": 7}}))
    await api.new_run()
    shown_to = await api.http.get("/ui/usage.json", headers={"X-API-Key": ALICE})
    (quota,) = [each for each in shown_to.json()["quotas"] if each["name"] == "sessions"]
    assert (quota["limit"], quota["used"], quota["is_own"]) == (7, 1, True)
    assert len(shown_to.json()["usage"]) == DAYS_SHOWN
    await log_in(api.http, ALICE)
    page = (await api.http.get("/ui/usage")).text
    assert "Set for you" in page
    assert 'href="/ui/usage"' in page
    await log_out(api.http)
    await log_in(api.http, ADMIN_KEY)
    assert (await api.http.get("/ui/usage")).status_code == 404
    assert 'href="/ui/usage"' not in (await api.http.get("/ui")).text


async def test_a_run_is_held_back_and_ended_from_its_page(api: Api) -> None:
    tenant, run = await tenant_of(api), await api.new_run()
    await log_in(api.http, ADMIN_KEY)
    for act, fields in (("pause", {"reason": HOSTILE}), ("resume", {}), ("close", {})):
        answer = await send(api.http, f"/ui/tenants/{tenant}/runs/{run}/{act}", fields)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/ui/runs/{quote(run, safe='')}")
        shown_run = await twin(api, f"/ui/runs/{run}")
        assert bool(shown_run["pause"]) == (act == "pause")
        assert shown_run["is_live"] == (act != "close")
        page = (await api.http.get(f"/ui/runs/{run}")).text
        assert ("End this run" in page) == (act != "close")
        assert HOSTILE not in page
    events = (await twin(api, "/ui/audit"))["events"]
    assert isinstance(events, list)
    assert [event["event"] for event in events] == ["run_close", "run_resume", "run_pause"]
    await log_out(api.http)
    await log_in(api.http, ALICE)
    assert "End this run" not in (await api.http.get(f"/ui/runs/{run}")).text


async def test_a_key_is_shown_once_where_it_was_made_and_revoked_from_the_list(api: Api) -> None:
    tenant = await tenant_of(api)
    await log_in(api.http, ADMIN_KEY)
    answer = await send(api.http, f"/ui/tenants/{tenant}/keys", {"name": HOSTILE, "role": "viewer", "days": "3"})
    (key,) = set(re.findall(r"tml-[\w-]+", answer.text))
    assert "viewer of tenant" in answer.text
    assert f"export COTRAIN_BASE_URL={api.http.base_url}".rstrip("/") in answer.text
    assert (await api.get("training_runs", key)).status_code == 200
    page = (await api.http.get(f"/ui/tenants/{tenant}")).text
    assert key not in page
    assert HOSTILE not in page
    key_id = (await api.services.tenants.key(key)).id
    await send(api.http, f"/ui/tenants/{tenant}/keys/{key_id}/revoke", {})
    assert (await api.get("training_runs", key)).status_code == 401
    made = await send(api.http, "/ui/tenants", {"name": "physicists"})
    assert re.findall(r"tml-[\w-]+", made.text)
    assert "physicists" in (await api.http.get("/ui/tenants?search=PHYS")).text
    assert "physicists" not in (await api.http.get("/ui/tenants?search=zzz")).text


async def test_an_expired_key_is_marked(api: Api) -> None:
    tenant = await tenant_of(api)
    await log_in(api.http, ADMIN_KEY)
    await send(api.http, f"/ui/tenants/{tenant}/keys", {"name": "short", "days": "1e-9"})
    assert "expired" in (await api.http.get(f"/ui/tenants/{tenant}")).text


async def test_a_refused_form_leads_back_to_its_page(api: Api) -> None:
    page = f"/ui/tenants/{await tenant_of(api)}"
    await log_in(api.http, ADMIN_KEY)
    for referer, back in ((f"http://x{page}?a=b", page), ("http://x/elsewhere", ""), ('http://x/ui/"><b>', "")):
        headers = {**FROM_HERE, "Referer": referer}
        answer = await api.http.post(f"{page}/limits", data={"ops": "lots"}, headers=headers)
        assert answer.status_code == 400
        assert (f'<a class="button" href="{page}">Back</a>' in answer.text) == bool(back)
        assert "<b>" not in answer.text


async def test_the_page_of_a_tenant_has_its_newest_failure_and_leads_to_its_runs(api: Api) -> None:
    tenant = await tenant_of(api)
    await log_in(api.http, ADMIN_KEY)
    api.services.refusals.record(TenantId(tenant), Refused(Reason.QUEUE_FULL))
    await api.services.refusals.store()
    page = (await api.http.get(f"/ui/tenants/{tenant}")).text
    assert str(Refused(Reason.QUEUE_FULL)) in page
    for list_of in ("runs", "checkpoints", "audit"):
        assert f'href="/ui/{list_of}?tenant={tenant}"' in page


async def test_a_tenant_has_one_limit_of_its_runs_on_both_pages(api: Api) -> None:
    await log_in(api.http, ALICE)
    pages = [(await api.http.get(path)).text for path in ("/ui", "/ui/usage")]
    assert ["200 GB" in page for page in pages] == [True, True]


async def test_a_worker_is_drained_and_taken_back_and_the_audit_page_says_so(api: Api) -> None:
    await log_in(api.http, ADMIN_KEY)
    for act in ("drain", "undrain"):
        answer = await send(api.http, f"/ui/workers/{POOL.id}/w0/{act}", {})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/workers")
        page = (await api.http.get("/ui/workers")).text
        assert ("Take it back" in page) == (act == "drain")
    assert (await send(api.http, f"/ui/workers/{POOL.id}/w9/drain", {})).status_code == 404
    audit = await api.http.get("/ui/audit")
    assert "worker_undrain" in audit.text
    events = (await twin(api, "/ui/audit"))["events"]
    assert isinstance(events, list)
    assert [event["event"] for event in events] == ["worker_undrain", "worker_drain"]
    assert (await api.http.get("/ui/audit?before=x")).status_code == 400
    assert (await api.http.get("/ui/audit?tenant=t-none")).status_code == 404


async def test_no_secret_stands_on_the_page_of_settings(api: Api) -> None:
    await log_in(api.http, ADMIN_KEY)
    page = (await api.http.get("/ui/settings")).text
    assert "COTRAIN_QUOTAS" in page
    for secret in (ALICE, BOB, ADMIN_KEY):
        assert secret not in page
    assert shown("redis_url", "redis://me:word@host:1/0") == "redis://hidden@host:1/0"
    assert shown("vllm_api_key", "abc") == "hidden"


async def test_a_thousand_tenants_make_a_small_page(api: Api) -> None:
    names = {f"t-{number:04}": f"tenant {number:04}" for number in range(1000)}
    await api.services.connection.hset("cotrain:tenants:names", mapping=names)
    await log_in(api.http, ADMIN_KEY)
    page = await api.http.get("/ui/tenants?offset=50")
    assert len(page.content) < 300_000
    assert "51 to 100 of 1,002" in page.text


async def two_workers(api: Api, run: str, restores: str = "") -> None:
    """Run two workers, the first with the run. One may restore runs."""
    redis = api.services.connection
    for worker in ("w0", "w1"):
        beat = WorkerHeartbeat(WorkerId(worker), 1, "serving", "cpu", 1.0, 0, 0, 0.0)
        if worker == "w1":
            beat = replace(beat, lora="seg", lora_fallback="not fused: no <kernel>")
        if worker == restores:
            beat = replace(beat, restoring=RESTORING)
        await redis.sadd(redis_keys.workers(POOL.id), worker)
        await redis.set(redis_keys.worker(POOL.id, beat.id), json.dumps(asdict(beat)))
    await redis.hset(redis_keys.log(POOL.id, RunId(run)), "worker", "w0")


async def test_a_run_is_sent_to_another_worker_from_its_page(api: Api) -> None:
    tenant, run, redis = await tenant_of(api), await api.new_run(ALICE), api.services.connection
    await log_in(api.http, ADMIN_KEY)
    assert "Move this run" not in (await api.http.get(f"/ui/runs/{quote(run)}")).text
    path = f"/ui/tenants/{tenant}/runs/{quote(run)}/move"
    assert (await send(api.http, path, {"worker": "w1"})).status_code == 404
    assert (await send(api.http, path, {"worker": "no worker"})).status_code == 400
    await two_workers(api, run)
    page = (await api.http.get(f"/ui/runs/{quote(run)}")).text
    assert re.findall(r"<option>(\w+)</option>", page) == ["w1"]
    answer = await send(api.http, path, {"worker": "w1"})
    assert answer.status_code == 303
    assert await redis.hgetall(redis_keys.moves(POOL.id)) == {run.encode(): b"w0>w1"}


async def test_a_worker_whose_lora_is_not_the_fastest_says_why(api: Api) -> None:
    await two_workers(api, await api.new_run(ALICE))
    await log_in(api.http, ADMIN_KEY)

    page = (await api.http.get("/ui/workers")).text
    fleet = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text

    assert page.count("not fused: no &lt;kernel&gt;") == 1
    fell_back = re.findall(r'cotrain_worker_lora_fell_back{.*worker="(\w+)"} (\S+)', fleet)
    assert fell_back == [("w0", "0.0"), ("w1", "1.0")]


async def test_a_run_is_sent_to_another_worker_from_the_page_of_workers(api: Api) -> None:
    tenant, run, redis = await tenant_of(api), await api.new_run(ALICE), api.services.connection
    cycle = {"cycle": 1, "runs": [{"run": run, "tenant": tenant, "tokens": 1234}]}
    await redis.lpush(redis_keys.cycles(POOL.id), json.dumps(cycle))
    await log_in(api.http, ADMIN_KEY)
    await two_workers(api, run)
    page = (await api.http.get("/ui/workers")).text
    assert "1,234" in page
    (action,) = re.findall(r'action="(/ui/tenants/[^"]+/move)"', page)
    assert re.findall(r"<option>(\w+)</option>", page) == ["w1"]
    answer = await send(api.http, action, {"worker": "w1"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/ui/runs/{quote(run)}")
    assert await redis.hgetall(redis_keys.moves(POOL.id)) == {run.encode(): b"w0>w1"}
    assert (await send(api.http, action, {"worker": "w9"})).status_code == 404
    await redis.delete(redis_keys.worker(POOL.id, WorkerId("w1")))
    assert "/move" not in (await api.http.get("/ui/workers")).text  # there is none to go to


async def test_everything_that_shows_a_worker_shows_that_it_restores_runs(api: Api) -> None:
    run = await api.new_run(ALICE)
    await two_workers(api, run, restores="w0")
    await log_in(api.http, ADMIN_KEY)

    for page in ("/ui", "/ui/workers"):
        assert (await api.http.get(page)).text.count(RESTORED) == 1
    ready = (await api.http.get("/readyz")).json()
    assert ready["restoring"] == [f"Worker w0 of {POOL.base_model} is {RESTORED}."]
    status = (await api.http.get("/status", headers=OPERATOR)).json()
    assert [each["restoring"] for each in status["pools"][0]["workers"]] == [RESTORING, None]
    fleet = (await api.http.get("/api/v1/fleet", headers=OPERATOR)).json()
    assert [each["restoring"] for each in fleet["pools"][0]["workers"]] == [RESTORING, None]
    metrics = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text
    left = re.findall(r'cotrain_worker_restoring_ops{.*worker="(\w+)"} (\S+)', metrics)
    assert left == [("w0", "159.0"), ("w1", "0.0")]
    waits = await api.services.futures.wait(TenantId(await tenant_of(api)), request_id(RunId(run), 0), 0.01)
    assert isinstance(waits, Pending)
    assert (waits.reason or "").startswith(f"worker is {RESTORED}; position 1 in its run's queue")


async def test_nothing_is_said_to_be_restored_where_nothing_is(api: Api) -> None:
    run = await api.new_run(ALICE)
    await two_workers(api, run)
    assert "restoring" not in (await api.http.get("/readyz")).json()
    tenant = TenantId(await tenant_of(api))
    waits = await api.services.futures.wait(tenant, request_id(RunId(run), 0), 0.01)
    assert isinstance(waits, Pending)
    assert (waits.reason or "").startswith("position 1 in its run's queue")
