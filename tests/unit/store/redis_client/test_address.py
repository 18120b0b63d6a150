from __future__ import annotations

import pytest

from cotrain_store.redis_client.address import MAX_REPLICAS, RedisAddress, parse_address, with_password


@pytest.mark.parametrize(
    "url",
    ["unix:///run/redis.sock", "redis://user:p%40ss@host:6379/0", "rediss://host:6380/1?ssl_ca_certs=%2Fetc%2Fca.pem"],
)
def test_an_address_of_redis_is_passed_on_unchanged(url: str) -> None:
    assert parse_address(url) == RedisAddress(url)


def test_our_own_options_are_not_passed_to_redis() -> None:
    address = parse_address("rediss://host/0?replicas=2&ssl_ca_certs=/ca.pem")
    assert address == RedisAddress("rediss://host/0?ssl_ca_certs=%2Fca.pem", replicas=2)


def test_sentinels_are_parsed_with_their_ports_and_their_service() -> None:
    address = parse_address("redis+sentinel://api:p%2Fw@one,two:26380/cotrain/3?replicas=1")
    assert address.sentinels == (("one", 26379), ("two", 26380))
    assert (address.service, address.replicas) == ("cotrain", 1)
    assert address.options == {"username": "api", "password": "p/w", "db": 3}
    assert address.sentinel_options == {}


def test_tls_applies_to_redis_and_sentinels_with_separate_passwords() -> None:
    address = parse_address("rediss+sentinel://:secret@one/cotrain?ssl_ca_certs=/ca.pem&sentinel_password=other")
    assert address.options == {
        "password": "secret", "db": 0, "ssl": True, "ssl_ca_certs": "/ca.pem",
    }  # fmt: skip
    assert address.sentinel_options == {"password": "other", "ssl": True, "ssl_ca_certs": "/ca.pem"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host", "begins with none of unix://, redis://"),
        ("redis+sentinel://one,two", "names no Sentinels and service"),
        ("redis+sentinel:///cotrain", "names no Sentinels and service"),
        ("redis+sentinel://one:x/cotrain", "port 'x' is no number up to 65535"),
        ("redis+sentinel://one/cotrain/first", "database 'first' is no number"),
        ("redis://host?replicas=-1", "replicas '-1' is no number"),
        (f"redis://host?replicas={MAX_REPLICAS + 1}", f"is no number up to {MAX_REPLICAS}"),
    ],
)
def test_an_invalid_address_is_refused_with_the_wrong_part(url: str, said: str) -> None:
    with pytest.raises(ValueError, match="redis_url") as refused:
        parse_address(url)
    assert said in str(refused.value)


def test_no_error_and_no_repr_shows_a_password() -> None:
    address = parse_address("redis+sentinel://api:hidden@one/cotrain?sentinel_password=hidden")
    assert "hidden" not in repr(address)
    with pytest.raises(ValueError, match="port") as refused:
        parse_address("redis+sentinel://api:hidden@one:x/cotrain")
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://redis:6379/0", "redis://:a%2Fb%40c@redis:6379/0"),
        ("redis://api@redis", "redis://api:a%2Fb%40c@redis"),
        ("unix:///run/s", "unix://:a%2Fb%40c@/run/s"),
        ("redis://one/0?client_name=a@b", "redis://:a%2Fb%40c@one/0?client_name=a@b"),
        (
            "redis+sentinel://api@one/cotrain?sentinel_password=d:e@f",
            "redis+sentinel://api:a%2Fb%40c@one/cotrain?sentinel_password=d:e@f",
        ),
        ("redis+sentinel://api@one,two/cotrain", "redis+sentinel://api:a%2Fb%40c@one,two/cotrain"),
    ],
)
def test_a_password_is_inserted_after_the_user(url: str, whole: str) -> None:
    assert with_password(url, "a/b@c") == whole


def test_two_passwords_are_refused() -> None:
    with pytest.raises(ValueError, match="set one"):
        with_password("redis://api:other@redis", "secret")
