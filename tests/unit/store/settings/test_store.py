"""The settings that all processes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cotrain_store.settings.store import StoreSettings


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
