"""Settings of the API, read from variables."""

from pathlib import Path

import pytest

from cotrain_server.settings import ServerSettings
from cotrain_store.tenants.quotas import Quotas


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("COTRAIN_REDIS_URL", "unix:///nowhere")
    monkeypatch.setenv("COTRAIN_DATA_DIR", str(tmp_path))
    return monkeypatch


def test_a_list_is_separated_by_commas_or_spaces(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("COTRAIN_API_KEYS", "tml-a,tml-b tml-c")
    keys = ServerSettings().api_keys
    assert [key.get_secret_value() for key in keys] == ["tml-a", "tml-b", "tml-c"]


def test_keys_are_not_part_of_the_repr(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("COTRAIN_API_KEYS", "tml-secret-of-somebody")
    variables.setenv("COTRAIN_ADMIN_KEY", "secret-of-the-admin")
    assert "secret" not in repr(ServerSettings())


def test_an_empty_variable_counts_as_unset(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("COTRAIN_ADMIN_KEY", "")
    variables.setenv("COTRAIN_API_KEYS", "")
    variables.setenv("COTRAIN_PUBLIC_URL", "")
    assert ServerSettings().public_url is None
    assert ServerSettings().admin_key is None
    assert ServerSettings().api_keys == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("QUOTAS", "ops=0"),
        ("QUOTAS", "ops=many"),
        ("QUOTAS", "ops"),
        ("QUOTAS", "opps=5"),
        ("PUBLIC_URL", "gpu.example"),
        ("PUBLIC_URL", "https://gpu.example/?a"),
        ("JWT_AUTH", "never"),
        ("ADMIN_KEY", "fifteen-letters"),
    ],
)
def test_an_invalid_value_stops_the_process(variables: pytest.MonkeyPatch, name: str, value: str) -> None:
    variables.setenv(f"COTRAIN_{name}", value)
    with pytest.raises(ValueError, match=name.lower()):
        ServerSettings()


def test_the_given_quotas_replace_their_defaults(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("COTRAIN_QUOTAS", "samples=3, bytes=5, sample_tokens=7")
    settings = ServerSettings()
    assert settings.quotas == Quotas(samples=3, bytes=5, sample_tokens=7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ops=0", "ops: Input should be greater than or equal to 1"),
        ("ops=2,tokens=many", "tokens: Input should be a valid integer"),
        ("opps=5", "opps: no quota; there are ops, tokens, bytes"),
    ],
)
def test_an_invalid_quota_is_named_with_its_limit(variables: pytest.MonkeyPatch, given: str, message: str) -> None:
    variables.setenv("COTRAIN_QUOTAS", given)
    with pytest.raises(ValueError, match=message):
        ServerSettings()


def test_an_omitted_quota_has_its_default(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("COTRAIN_QUOTAS", "ops=3")
    assert ServerSettings().quotas == Quotas(ops=3)
    variables.setenv("COTRAIN_QUOTAS", "")
    assert ServerSettings().quotas == Quotas()
