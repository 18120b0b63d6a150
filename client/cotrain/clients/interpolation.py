"""A linear combination of checkpoints: a request in no run's order, made once and waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_json
from cotrain.transport.http import read
from cotrain.types import UntypedAPIFuture
from cotrain.wire.mint import InterpolateResponse

if TYPE_CHECKING:
    from cotrain.requests.event_loop_thread import BackgroundLoop
    from cotrain.transport.http import Transport
    from cotrain.wire.mint import InterpolateRequest


def interpolate(
    loop: BackgroundLoop, transport: Transport, wanted: InterpolateRequest
) -> Future[InterpolateResponse]:
    """POST it at once; the future is accepted when the server has queued it."""

    async def submit() -> str:
        answer = await transport.post("mint/checkpoints/interpolate", wanted)
        return read(answer, UntypedAPIFuture).request_id

    accepted = loop.start(submit())

    async def finish() -> InterpolateResponse:
        request_id = await asyncio.shield(asyncio.wrap_future(accepted))
        return InterpolateResponse.model_validate(await wait_for_json(transport, request_id))

    return Future(accepted, loop.start(finish()), what="an interpolation of checkpoints")
