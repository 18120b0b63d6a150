"""Frequent requests in front of the framework: only the POSTs of their paths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cotrain_server.app import FREQUENT
from cotrain_server.http.direct_routes import DirectRoutes


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
