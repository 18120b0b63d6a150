"""Fork: copies of a run at one position in its order, as the trials of a sweep."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

from cotrain.clients.session import Session
from cotrain.clients.sweep import RunT, Sweep, Trial
from cotrain.errors import MalformedMessage, UnsupportedInput, status_error
from cotrain.requests.futures import Future
from cotrain.requests.polling import wait_for_result
from cotrain.transport.responses import reader
from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.runs import AdamParams, ForkRunRequest, NewRun, SweepFutures
from cotrain.wire.sampling import SaveWeightsForSamplerResponse


def adams_of(n: int | None, lr: Sequence[float] | None) -> list[AdamParams]:
    """Return the optimizer of each copy. Raises UnsupportedInput."""
    count = n if n is not None else len(lr or ())
    if not 1 <= count <= MAX_SWEEP_RUNS or (lr is not None and len(lr) != count):
        given = "" if lr is None else f", and lr has {len(lr)} rates"
        raise UnsupportedInput(f"n must be 1 to {MAX_SWEEP_RUNS} and lr have as many rates: n is {n}{given}")
    return [AdamParams(learning_rate=rate) for rate in lr] if lr else [AdamParams()] * count


async def fork_run(
    session: Session,
    model_id: str,
    saved: Future[SaveWeightsForSamplerResponse],
    adams: Sequence[AdamParams],
    name: str | None,
    client_of: Callable[[NewRun], RunT],
) -> Sweep[RunT]:
    """Create one copy of a run for each optimizer, and return the sweep of their clients.

    `saved` are the run's weights and optimizer state. Raises RequestFailed or APIError.
    """
    sampler_id = (await saved).sampling_session_id
    if sampler_id is None:
        raise MalformedMessage("save_weights_for_sampler did not answer with a sampler")
    name = name or secrets.token_hex(4)
    settings = [{"lr": adam.learning_rate} for adam in adams]
    request = ForkRunRequest(
        session_id=await session.id(),
        sampling_session_id=sampler_id,
        model_seq_ids=[next(session.run_numbers) for _ in adams],
        user_metadata=[
            {"sweep": name, "trial": number, "forked_from": model_id, **each} for number, each in enumerate(settings)
        ],
        tags=[f"sweep:{name}"],
    )
    transport = session.connection.transport
    answer = await transport.post("fork_run", request, reader(SweepFutures))
    for refused in answer.runs:
        if refused.error is not None:
            raise status_error(refused.status_code, refused.error, None)
    made = await asyncio.gather(*(wait_for_result(transport, each.request_ids[0], NewRun) for each in answer.runs))
    trials = [Trial(number, settings[number], client_of(run), adams[number]) for number, run in enumerate(made)]
    return Sweep(session.connection, name, trials)
