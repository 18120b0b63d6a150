"""A linear combination of checkpoints: a request in no run's order, made once and waited for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cotrain.futures import Future
from cotrain.mint_types import InterpolateResponse
from cotrain.polling import wait_for_json
from cotrain.transport import read
from cotrain.types import UntypedAPIFuture

if TYPE_CHECKING:
    from cotrain.background import BackgroundLoop
    from cotrain.mint_types import InterpolateRequest
    from cotrain.transport import Transport


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
