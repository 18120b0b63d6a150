from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cotrain import NotFoundError, ServiceClient, SettingsMissing
from cotrain.settings import client_settings
from tests.support.fake_api import FakeApi, refusal


def test_a_session_is_opened_once_and_only_when_needed(api: FakeApi, service: ServiceClient) -> None:
    service.get_server_capabilities()
    assert api.paths() == ["get_server_capabilities"]
    service.create_lora_training_client("m")
    service.create_lora_training_client("m")
    assert api.paths().count("create_session") == 1
    assert [body["model_seq_id"] for body in api.bodies("create_model")] == [0, 1]


def test_the_adapter_is_described_as_requested(api: FakeApi, service: ServiceClient) -> None:
    service.create_lora_training_client("m", 8, 3, train_unembed=False, user_metadata={"a": "b"})
    sent = api.bodies("create_model")[0]
    assert sent["lora_config"] == {
        "rank": 8,
        "seed": 3,
        "alpha": 32.0,
        "dropout": 0.0,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }
    assert sent["user_metadata"] == {"a": "b"}


def test_every_method_works_in_an_event_loop_too(service: ServiceClient) -> None:
    async def create() -> str:
        run = await service.create_lora_training_client_async("m", rank=4)
        capabilities = await service.get_server_capabilities_async()
        return f"{run.model_id} on {capabilities.supported_models[0].model_name}"

    assert asyncio.run(create()) == "s1:train:0 on m"


def test_a_refused_run_raises_with_the_reason(api: FakeApi, service: ServiceClient) -> None:
    api.answers["create_model"] = [refusal(404, "Base model 'x' is not served here.")]
    with pytest.raises(NotFoundError, match="not served here"):
        service.create_lora_training_client("x")


def test_leaving_the_context_finishes_the_session(api: FakeApi) -> None:
    with ServiceClient("http://server", "tml-key", network=api.network) as service:
        service.create_lora_training_client("m")
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "success"}}]


def test_the_client_is_an_asynchronous_context_too(api: FakeApi) -> None:
    async def work() -> None:
        async with ServiceClient("http://server", "tml-key", network=api.network) as service:
            await service.create_lora_training_client_async("m")

    asyncio.run(work())
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "success"}}]


def test_leaving_by_an_error_reports_it(api: FakeApi) -> None:
    def fail() -> None:
        with ServiceClient("http://server", "tml-key", network=api.network) as service:
            service.create_lora_training_client("m")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "errored"}}]


def test_closing_twice_is_harmless(api: FakeApi) -> None:
    service = ServiceClient("http://server", "tml-key", network=api.network)
    service.close()
    service.close()
    assert api.paths() == []


def test_the_server_address_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_BASE_URL", "http://elsewhere:1/")
    monkeypatch.setenv("COTRAIN_API_KEY", "tml-a_b")
    settings = client_settings()
    assert (settings.base_url, settings.api_key) == ("http://elsewhere:1", "tml-a_b")
    assert client_settings("http://here").base_url == "http://here"
    assert "tml-a_b" not in repr(settings)


@pytest.mark.parametrize("url", ["gpu-host:8000", "127.0.0.1", "ftp://gpu-host", "http://", {"a": 1}, 8000])
def test_an_invalid_address_is_refused_at_once(url: Any) -> None:
    with pytest.raises(SettingsMissing, match=r"must be like http://127.0.0.1:8000, not "):
        ServiceClient(url, "tml-key")


def test_white_space_around_an_address_or_a_key_is_removed() -> None:
    here = client_settings("http://here", "tml-a")
    for address in (" http://here/ ", "http://here/api/v1", "http://here/api/v1/"):
        assert client_settings(address, "tml-a\n") == here


@pytest.mark.parametrize("key", ["tml-ü", "tml-a\nb", b"tml-a"])
def test_a_key_with_invalid_characters_is_refused_and_not_shown(key: Any) -> None:
    with pytest.raises(SettingsMissing, match="visible ASCII") as refused:
        client_settings("http://here", key)
    assert "tml" not in str(refused.value)


def test_a_client_without_a_key_raises_with_how_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTRAIN_API_KEY", raising=False)
    with pytest.raises(SettingsMissing, match="COTRAIN_API_KEY"):
        client_settings()
