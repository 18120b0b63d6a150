"""Layers around the application: request ids, and frequent requests in front of the framework."""

from dataclasses import dataclass

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cotrain_server.app import FREQUENT
from cotrain_server.http.middleware import DirectRoutes, request_id_of


@pytest.mark.parametrize("given", ["a", "3f2a-77.b_c:9", "x" * 64])
def test_a_safe_request_id_is_kept(given: str) -> None:
    assert request_id_of([(b"host", b"h"), (b"x-request-id", given.encode())]) == given


@pytest.mark.parametrize(
    "given", ["", "x" * 65, "a b", "a\tb", 'a"b', "a\n", "é", "a/b", "tml-0123456789abcdef_secret"]
)
def test_an_unsafe_request_id_is_replaced(given: str) -> None:
    made = request_id_of([(b"x-request-id", given.encode("latin-1"))])
    assert made != given
    assert request_id_of([(b"x-request-id", made.encode())]) == made


def test_two_request_ids_are_replaced() -> None:
    assert request_id_of([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) not in ("a", "b")


@dataclass(frozen=True)
class Direct:
    path: str

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"direct")(scope, receive, send)


async def framework(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"framework")(scope, receive, send)


@pytest.mark.parametrize(
    ("method", "path", "by"),
    [("POST", "/asked", b"direct"), ("GET", "/asked", b"framework"), ("POST", "/other", b"framework")],
)
async def test_the_posts_of_a_path_are_answered_directly(method: str, path: str, by: bytes) -> None:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope: Scope = {"type": "http", "method": method, "path": path}
    await DirectRoutes(framework, [Direct("/asked")])(scope, receive, send)
    assert sent[1]["body"] == by
    assert (scope.get("route") is not None) == (by == b"direct")


def test_the_requests_of_a_training_step_are_among_them() -> None:
    paths = {route.path for route in FREQUENT}
    assert paths == {f"/api/v1/{name}" for name in ("forward_backward", "forward", "optim_step", "asample")}
