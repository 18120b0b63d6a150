"""Signed links and tokens: valid until their expiry, and only with a valid signature."""

import base64
import json
import time
from dataclasses import replace

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_server.errors import InvalidToken
from cotrain_server.signed_tokens import TOKEN_LIFE_S, Link, Signer, Token
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import TenantId, WeightsRef
from tests.support.refusals import refused

OLD, NEW = b"o" * 32, b"n" * 32
SIGNER = Signer((NEW, OLD))
LINK = Link(TenantId("t-1"), "tinker://s:train:0/weights/a", WeightsRef("s:train:0:3"), "f", 1_000)
TOKEN = Token(TenantId("t-1"), "k1", "alice")
NOW = 900.0


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def test_a_link_contains_what_was_signed() -> None:
    assert SIGNER.read_link(SIGNER.sign_link(LINK), NOW) == LINK


def test_a_link_expires_at_its_time() -> None:
    text = SIGNER.sign_link(LINK)
    SIGNER.read_link(text, 999.9)
    with refused(Reason.BAD_LINK):
        SIGNER.read_link(text, 1_000.0)


def test_signatures_of_the_previous_secret_are_valid_and_others_are_not() -> None:
    before = Signer((OLD, b"x" * 32))
    assert SIGNER.read_link(before.sign_link(LINK), NOW) == LINK
    assert SIGNER.read_token(before.make_token(TOKEN, time.time())) == TOKEN
    other = Signer((b"x" * 32, b"y" * 32))
    with refused(Reason.BAD_LINK):
        SIGNER.read_link(other.sign_link(LINK), NOW)
    with pytest.raises(InvalidToken):
        SIGNER.read_token(other.make_token(TOKEN, time.time()))


@pytest.mark.parametrize(
    "changed",
    [
        replace(LINK, tenant=TenantId("t-2")),
        replace(LINK, path="tinker://s:train:0/weights/b"),
        replace(LINK, weights=WeightsRef("s:train:0:4")),
        replace(LINK, file="g"),
        replace(LINK, expires_at=9_000),
    ],
)
def test_no_part_of_a_link_can_be_exchanged(changed: Link) -> None:
    content = SIGNER.sign_link(changed).partition(".")[0]
    seal = SIGNER.sign_link(LINK).partition(".")[2]
    with refused(Reason.BAD_LINK):
        SIGNER.read_link(f"{content}.{seal}", NOW)


@given(st.text())
def test_any_other_text_is_neither_a_link_nor_a_token(text: str) -> None:
    with refused(Reason.BAD_LINK):
        SIGNER.read_link(text, NOW)
    with pytest.raises(InvalidToken):
        SIGNER.read_token(text)


def test_a_token_replaces_a_key_for_an_hour() -> None:
    now = time.time()
    assert SIGNER.read_token(SIGNER.make_token(TOKEN, now)) == TOKEN
    with pytest.raises(InvalidToken) as refused:
        SIGNER.read_token(SIGNER.make_token(TOKEN, now - TOKEN_LIFE_S - 1))
    assert refused.value.expired


def test_a_token_has_the_claims_that_sdks_read() -> None:
    claims = jwt.decode(SIGNER.make_token(TOKEN, NOW), options={"verify_signature": False})
    assert (claims["sub"], claims["org_id"]) == ("t-1", "t-1")
    assert claims["iss"].startswith("passport-")
    assert claims["exp"] - claims["iat"] == TOKEN_LIFE_S


def test_a_token_without_a_valid_signature_is_invalid() -> None:
    good = SIGNER.make_token(TOKEN, time.time())
    header, claims, seal = good.split(".")
    for forged in (
        f"{part({'alg': 'none', 'typ': 'JWT'})}.{claims}.",
        f"{part({'alg': 'none', 'typ': 'JWT'})}.{claims}.{seal}",
        f"{part({'alg': 'HS512', 'typ': 'JWT'})}.{claims}.{seal}",
        f"{part({'alg': 'RS256', 'typ': 'JWT'})}.{claims}.{seal}",
        f"{header}.{claims}.",
        f"{header}.{claims}",
        f"{header}.{part({'sub': 't-2', 'jti': 'k1', 'name': '', 'iat': 0, 'exp': 9e9})}.{seal}",
    ):
        with pytest.raises(InvalidToken) as refused:
            SIGNER.read_token(forged)
        assert not refused.value.expired
    assert SIGNER.read_token(good) == TOKEN


def test_a_token_without_an_expiry_is_invalid() -> None:
    claims = {"sub": "t-1", "jti": "k1", "name": "", "iat": 0}
    endless = jwt.encode(claims, SIGNER._token_keys[0], algorithm="HS256")
    with pytest.raises(InvalidToken):
        SIGNER.read_token(endless)


def test_the_signing_key_of_links_makes_no_valid_token() -> None:
    claims = {"sub": "t", "jti": "k", "name": "", "iat": 0, "exp": int(time.time()) + 99}
    forged = jwt.encode(claims, SIGNER._link_keys[0], algorithm="HS256")
    with pytest.raises(InvalidToken):
        SIGNER.read_token(forged)
