"""`cotrain admin` against a real server: its output as JSON and as text, and its error messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner, Result

from cotrain.cli import command_line
from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from tests.support.http_api import ADMIN_KEY, ALICE, POOL, publish_pool
from tests.support.redis_server import EmbeddedRedis


@pytest.fixture
def server(empty_redis: EmbeddedRedis, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Address and key of a server, as environment variables."""
    settings = ServerSettings.model_validate(
        {
            "redis_url": empty_redis.url, "data_dir": tmp_path, "disk_reserve_bytes": 0,
            "api_keys": (ALICE,), "admin_key": ADMIN_KEY,
        }
    )  # fmt: skip
    publish_pool(empty_redis.url, tmp_path)
    running = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_config=None))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    port = running.servers[0].sockets[0].getsockname()[1]
    yield {"COTRAIN_BASE_URL": f"http://127.0.0.1:{port}", "COTRAIN_ADMIN_KEY": ADMIN_KEY}
    running.should_exit = True
    thread.join()


def run(server: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(command_line([]), ["admin", *words], env=server)


def asked(server: dict[str, str], *words: str) -> Any:
    result = run(server, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_operator_runs_every_command(server: dict[str, str]) -> None:
    made = asked(server, "tenants", "create", "lab")
    tenant = made["tenant"]
    shown = asked(server, "tenants", "set", tenant, "--limit", "ops=7", "--weight", "2")
    assert (shown["weight"], shown["quotas"][0]["limit"]) == (2.0, 7)
    shown = asked(server, "tenants", "set", tenant, "--limit", "ops=default")
    assert not shown["quotas"][0]["is_own"]
    guest = asked(server, "keys", "create", tenant, "guest", "--role", "viewer", "--days", "1")
    asked(server, "keys", "revoke", tenant, made["id"])
    assert [key["id"] for key in asked(server, "keys", "list", tenant)] == [guest["id"]]
    asked(server, "tenants", "pause", tenant, "--reason", "[red]why[/]")
    assert "paused: [red]why[/]" in run(server, "tenants", "show", tenant).output
    asked(server, "tenants", "resume", tenant)
    assert asked(server, "workers", "list")["workers"][0]["state"] == "away"
    asked(server, "workers", "drain", POOL.id, "w0")
    (worker,) = asked(server, "workers", "list")["workers"]
    assert worker["drain_asked_at"] is not None
    asked(server, "workers", "undrain", POOL.id, "w0")
    events = [event["event"] for event in asked(server, "audit")["events"]]
    assert events[:2] == ["worker_undrain", "worker_drain"]
    assert len(events) == 11
    (pool,) = asked(server, "fleet")["pools"]
    assert (pool["base_model"], pool["workers"]) == (POOL.base_model, [])
    assert POOL.base_model in run(server, "fleet").output
    for words in (("tenants", "list"), ("keys", "list", tenant), ("workers", "list"), ("audit",)):
        assert run(server, *words).exit_code == 0


def test_errors_are_one_sentence(server: dict[str, str]) -> None:
    for words, says in (
        (("tenants", "show", "t-none"), "Tenant not found."),
        (("workers", "drain", "p-none", "w0"), "Worker not found."),
        (("runs", "move", "t-none", "r:train:0", "w0"), "Tenant not found."),
        (("tenants", "create", "\x1b[2J"), "name: String should match pattern"),
    ):
        result = run(server, *words)
        assert result.exit_code == 1
        assert says in result.output, result.output
    tenant = asked(server, "tenants", "create", "x")["tenant"]
    for limit, says in (("ops=0", "limits.ops: "), ("opps=1", "limits.opps: Extra inputs")):
        result = run(server, "tenants", "set", tenant, "--limit", limit)
        assert (result.exit_code, says in result.output) == (1, True), result.output
    assert run(server, "tenants", "set", tenant, "--limit", "ops=-1").exit_code == 2
    wrong = run(server | {"COTRAIN_ADMIN_KEY": "not-this-one-at-all"}, "tenants", "list")
    assert "does not take this admin key" in wrong.output
    none = run(server | {"COTRAIN_ADMIN_KEY": "", "COTRAIN_DATA_DIR": "/nowhere"}, "tenants", "list")
    assert "The admin key is needed" in none.output
