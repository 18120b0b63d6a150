"""Settings that all processes share, and those of a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cotrain_store.settings import StoreSettings, WorkerSettings, pool_of


def test_every_setting_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_REDIS_URL", "unix:///run/redis.sock")
    monkeypatch.setenv("COTRAIN_DATA_DIR", "/data")
    monkeypatch.setenv("COTRAIN_ACCEPT_DATA_LOSS", "true")
    settings = StoreSettings()
    assert settings.redis_url == "unix:///run/redis.sock"
    assert settings.blob_store.folder == Path("/data")
    assert settings.accept_data_loss


def test_required_settings_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTRAIN_REDIS_URL", raising=False)
    with pytest.raises(ValidationError, match="redis_url"):
        StoreSettings(data_dir=Path("/data"))


def test_settings_are_immutable() -> None:
    settings = StoreSettings(redis_url="unix:///x", data_dir=Path("/data"))
    with pytest.raises(ValidationError, match="frozen"):
        settings.redis_url = "other"  # type: ignore[misc]  # as mypy says


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValidationError, match="redis_urll"):
        StoreSettings.model_validate({"redis_url": "x", "data_dir": "/", "redis_urll": "y"})


def test_the_password_in_a_file_is_inserted_into_the_url(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("a/b@c\n")
    for url, whole in (
        ("redis://redis:6379/0", "redis://:a%2Fb%40c@redis:6379/0"),
        ("unix:///run/s", "unix://:a%2Fb%40c@/run/s"),
    ):
        settings = StoreSettings(redis_url=url, data_dir=tmp_path, redis_password_file=file)
        assert settings.redis_url == whole


@pytest.mark.parametrize(
    ("url", "content", "message"),
    [
        ("redis://:other@redis", "secret", "set one"),
        ("redis://redis", "", "is empty"),
        ("redis://redis", None, "No such file"),
    ],
)
def test_an_invalid_password_file_is_reported(tmp_path: Path, url: str, content: str | None, message: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValidationError, match=message):
        StoreSettings(redis_url=url, data_dir=tmp_path, redis_password_file=file)


def test_without_a_file_there_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_REDIS_PASSWORD_FILE", "")
    settings = StoreSettings(redis_url="redis://redis", data_dir=Path("/data"))
    assert (settings.redis_url, settings.redis_password_file) == ("redis://redis", None)


def settings(**given: object) -> WorkerSettings:
    required = {"redis_url": "unix:///x", "data_dir": Path("/data"), "base_model": "tiny"}
    return WorkerSettings.model_validate(required | given)


@pytest.mark.parametrize(
    ("base_model", "name", "source"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/models/tiny", "/models/tiny", "/models/tiny"),
        ("tiny=/models/a=b", "tiny", "/models/a=b"),
    ],
)
def test_a_base_model_may_be_served_under_another_name(base_model: str, name: str, source: str) -> None:
    made = settings(base_model=base_model)
    assert (made.model_name, made.model_source) == (name, source)


def test_the_name_of_a_pool_is_readable_unique_and_valid_in_a_key() -> None:
    names = ["Qwen/Qwen3-8B", "Qwen-Qwen3-8B", "{x}:*", "ü", "a" * 500]
    pools = [pool_of(name) for name in names]
    assert len(set(pools)) == len(names)
    assert pools[0].startswith("Qwen-Qwen3-8B-")
    assert all(len(pool) <= 49 and not set(pool) & set("{}:* /") for pool in pools)
    assert pool_of("tiny") == pool_of("tiny")


@pytest.mark.parametrize("worker_id", ["", "a:b", "a b", "{x}", "../w", "-w", "w" * 65])
def test_a_worker_id_is_valid_in_a_key_and_a_file_name(worker_id: str) -> None:
    with pytest.raises(ValidationError, match="worker_id"):
        settings(worker_id=worker_id)


@pytest.mark.parametrize("worker_id", ["w0", "gpu-1.example.com", "0", "A_b"])
def test_a_worker_may_have_the_name_of_a_host(worker_id: str) -> None:
    assert settings(worker_id=worker_id).worker_id == worker_id


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "tpu"},
        {"dtype": "float16"},
        {"micro_batch_tokens": 255},
        {"micro_batch_tokens": "many"},
        {"max_rank": 0},
        {"replay_backlog_s": 0},
        {"torch_threads": -1},
        {"quantization": "int4"},
        {"sampler": "sglang"},
        {"sampling_share": 1.0},
        {"kv_cache_tokens": -1},
    ],
)
def test_an_invalid_value_is_refused_by_name(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValidationError, match=name):
        settings(**wrong)


def test_the_micro_batch_size_is_a_number_or_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().micro_batch_tokens == "auto"
    for given, expected in (("auto", "auto"), ("1024", 1024)):
        monkeypatch.setenv("COTRAIN_MICRO_BATCH_TOKENS", given)
        assert settings().micro_batch_tokens == expected


def test_a_vllm_sampler_needs_a_url() -> None:
    with pytest.raises(ValidationError, match="vllm_url"):
        settings(sampler="vllm")
    assert settings(sampler="vllm", vllm_url="http://gpu:8000").vllm_url == "http://gpu:8000"


@pytest.mark.parametrize("other", [{"group_size": 2}, {"sampler": "vllm", "vllm_url": "http://gpu:8000"}])
def test_a_quantized_base_is_whole_and_samples_itself(other: dict[str, object]) -> None:
    assert settings(quantization="nf4").quantization == "nf4"
    with pytest.raises(ValidationError, match="quantization needs"):
        settings(quantization="nf4", **other)


def test_a_password_is_not_shown() -> None:
    made = settings(vllm_api_key="secret")
    assert "secret" not in repr(made)
    assert made.vllm_api_key.get_secret_value() == "secret"
