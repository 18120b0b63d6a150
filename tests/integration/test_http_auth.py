"""Tokens that replace API keys, and the operations of a key on itself."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from tinker.lib._jwt_auth import JwtAuthProvider

from cotrain_server.limits import WRONG_KEYS_PER_MINUTE
from cotrain_server.signed_tokens import TOKEN_LIFE_S, Signer, Token
from cotrain_store.messages.ids import TenantId
from tests.support.http_api import ALICE, BOB, Api, running_api
from tests.support.redis_server import EmbeddedRedis

INVALID_TOKEN = 'Bearer error="invalid_token"'


async def token_of(api: Api, key: str) -> str:
    answer = await api.post("auth/token", {}, key)
    assert answer.status_code == 200, answer.text
    token: str = answer.json()["jwt"]
    return token


async def status_with(api: Api, key: str) -> int:
    return (await api.get("get_server_capabilities", key)).status_code


async def test_a_token_belongs_to_the_tenant_of_its_key(api: Api) -> None:
    token = await token_of(api, ALICE)
    run = await api.new_run(token)
    assert (await api.post("get_info", {"model_id": run})).status_code == 200
    assert (await api.post("get_info", {"model_id": run}, token)).status_code == 200
    assert (await api.post("get_info", {"model_id": run}, BOB)).status_code == 404
    bobs = await token_of(api, BOB)
    assert (await api.post("get_info", {"model_id": run}, bobs)).status_code == 404
    bearer = {"Authorization": f"Bearer {token}"}
    assert (await api.http.get("/api/v1/get_server_capabilities", headers=bearer)).is_success


async def test_only_a_key_can_create_tokens(api: Api) -> None:
    token = await token_of(api, ALICE)
    for method in ("POST", "GET", "DELETE"):
        path = "auth/token" if method == "POST" else "auth/apikey/me"
        answer = await api.http.request(method, f"/api/v1/{path}", headers={"X-API-Key": token}, json={})
        assert answer.status_code == 401
        assert answer.json()["detail"] == "Show the API key itself here, not a token."
        assert "www-authenticate" not in answer.headers  # a new token would not help
    assert (await api.post("auth/token", {}, "tml-wrong_x")).status_code == 401


async def test_only_some_clients_are_asked_to_exchange_their_key(api: Api) -> None:
    async def told(key: str) -> bool:
        config: bool = (await api.post("client/config", {}, key)).json()["pjwt_auth_enabled"]
        return config

    key = await api.services.tenants.issue("carol", prefix="sk")
    assert [await told(k) for k in (ALICE, key, await token_of(api, key))] == [False, True, False]


async def test_all_clients_can_be_asked_to_exchange_their_key(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, jwt_auth="always") as api:
        config = await api.post("client/config", {}, ALICE)
        assert config.json()["pjwt_auth_enabled"]
        with_token = await api.post("client/config", {}, await token_of(api, ALICE))
        assert not with_token.json()["pjwt_auth_enabled"]


async def test_an_expired_token_always_requests_a_new_one(api: Api) -> None:
    key = await api.services.tenants.key(ALICE)
    whose = Token(key.tenant, key.id, key.name)
    expired = api.services.signer.make_token(whose, time.time() - TOKEN_LIFE_S - 1)
    for _ in range(15):
        answer = await api.get("get_server_capabilities", expired)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == INVALID_TOKEN
    assert await status_with(api, ALICE) == 200


@pytest.mark.parametrize("wrong", ["secret", "none", "algorithm", "claims", "noise"])
async def test_a_forged_token_is_rejected_and_counted(api: Api, wrong: str) -> None:
    key = await api.services.tenants.key(ALICE)
    now = int(time.time())
    claims = {"sub": key.tenant, "jti": key.id, "name": "", "iat": now, "exp": now + 60}
    good = await token_of(api, ALICE)
    header, _, seal = good.split(".")
    forged = {
        "secret": Signer((b"x" * 32,)).make_token(Token(key.tenant, key.id, ""), now),
        "none": jwt.encode(claims, None, algorithm="none"),
        "algorithm": jwt.encode(claims, b"x" * 64, algorithm="HS512"),
        "claims": f"{header}.{jwt.encode(claims, b'x' * 32).split('.')[1]}.{seal}",
        "noise": "eyJ...",
    }[wrong]
    codes = [await status_with(api, forged) for _ in range(11)]
    assert codes == [401] * 10 + [429]
    assert await status_with(api, good) == 200


async def test_a_token_expires_within_five_seconds_of_its_key(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await api.services.tenants.issue("carol")
    token = await token_of(api, key)
    assert await status_with(api, token) == 200
    answer = await api.http.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": key})
    assert answer.status_code == 204
    later = time.monotonic() + 5.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    refused = await api.get("get_server_capabilities", token)
    assert (refused.status_code, refused.json()["detail"]) == (401, "Invalid API key.")
    assert await status_with(api, key) == 401


async def test_a_token_expires_with_its_key(api: Api) -> None:
    key = await api.services.tenants.issue("carol", not_after=time.time() + 3_600)
    record = await api.services.tenants.key(key)
    token = await token_of(api, key)
    assert await status_with(api, token) == 200
    expired = await api.services.tenants.issue("carol", not_after=time.time() - 1)
    key_id = expired.removeprefix("tml-").partition("_")[0]
    whose = Token(record.tenant, key_id, record.name)
    assert await status_with(api, api.services.signer.make_token(whose, time.time())) == 401


async def test_the_sdk_gets_a_new_token_when_its_own_is_rejected(api: Api) -> None:
    key = await api.services.tenants.key(ALICE)
    foreign = Signer((b"x" * 32,)).make_token(Token(key.tenant, key.id, ""), time.time())
    exchanges = iter([foreign, await token_of(api, ALICE)])

    async def auth_token() -> Any:
        return SimpleNamespace(jwt=next(exchanges))

    service = SimpleNamespace(service=SimpleNamespace(auth_token=auth_token))
    provider = JwtAuthProvider(lambda: contextlib.nullcontext(service))
    answer = await api.http.get("/api/v1/get_server_capabilities", auth=provider)
    await provider.close()
    assert answer.status_code == 200
    assert next(exchanges, None) is None


async def test_a_token_of_an_unknown_key_is_rejected(api: Api) -> None:
    token = api.services.signer.make_token(Token(TenantId("t-x"), "nobody", ""), time.time())
    assert await status_with(api, token) == 401


async def test_a_key_returns_its_own_description(api: Api) -> None:
    key = await api.services.tenants.issue("carol's laptop")
    answer = (await api.get("auth/apikey/me", key)).json()
    record = await api.services.tenants.key(key)
    assert isinstance(answer.pop("key_id"), int)
    assert answer == {
        "name": "carol's laptop",
        "note": f"cotrain keys revoke {record.id}",
        "details": {"org_details": {"name": record.tenant}, "user_details": {"email": "carol's laptop"}},
    }


async def test_a_key_can_revoke_only_itself(api: Api) -> None:
    tenants = api.services.tenants
    key = await tenants.issue("carol")
    tenant = (await tenants.authenticate(key)).id
    other = await tenants.issue("carol", tenant=tenant)
    assert await delete_me(api, key) == 204
    assert await status_with(api, key) == 401
    assert await status_with(api, other) == 200
    entries: Any = (await api.get("audit", other)).json()["entries"]
    assert [entry["event"] for entry in entries] == ["apikey_revoke"]


async def test_a_key_in_the_servers_settings_cannot_revoke_itself(api: Api) -> None:
    assert await delete_me(api, ALICE) == 403
    assert await status_with(api, ALICE) == 200


async def delete_me(api: Api, key: str) -> int:
    answer = await api.http.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": key})
    return answer.status_code


async def test_a_poll_with_an_unknown_key_is_rejected_and_counted_once(api: Api) -> None:
    statuses = [
        (await api.post("retrieve_future", {"request_id": "x"}, "tml-nobody")).status_code
        for _ in range(WRONG_KEYS_PER_MINUTE + 1)
    ]
    assert statuses == [401] * WRONG_KEYS_PER_MINUTE + [429]
    assert (await api.post("retrieve_future", {"request_id": "x"}, ALICE)).status_code == 404
