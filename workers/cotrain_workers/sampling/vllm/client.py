"""Client of the HTTP API of a vLLM server, the bodies of `/v1/completions`, and their responses.

Every sequence is a separate request with its own seed. With vLLM's `n`, sequence `i` would have the seed
`seed + i`. It would then equal sequence `i - 1` of a request whose seed is one higher.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cotrain_workers.engine.decoding.requests import (
    NOT_COMPUTED_LOGPROB,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    TopK,
)
from cotrain_workers.engine.spec import seed_of

# The response to a generation arrives at its end, however long it takes. Keep-alive of the connection detects
# a disconnected server within a minute. This timeout detects a hung one.
TIMEOUT = httpx.Timeout(connect=10.0, write=60.0, read=3600.0, pool=None)
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not on every system
    ),
]
_MESSAGE_CHARACTERS = 500
# Prefix of each id with `return_tokens_as_token_ids`. Text would not identify a token unambiguously.
_TOKEN = "token_id:"  # noqa: S105 - not a secret
Row = Mapping[int, float]  # log-prob by token, at one position


class VllmError(Exception):
    """A request to a vLLM server failed."""


class VllmUnavailable(VllmError):
    """The server does not answer or cannot serve now. The same request may succeed later."""

    def __init__(self, reason: str, *, is_reached: bool) -> None:
        """Store the reason. `is_reached`: the server had received the request, which may be the cause."""
        super().__init__(reason)
        self.is_reached = is_reached


class VllmRefused(VllmError):
    """The server rejects the request as invalid; the message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdapterUnknown(VllmError):
    """The server has no model of this name: it was restarted, or another client unloaded the adapter."""


class AdapterRefused(VllmError):
    """The server cannot load an adapter. The message may contain paths, so it is for the log, never for a tenant."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a vLLM server, found by the start-up check."""

    model: str  # name that the base model is served under
    context_tokens: int  # maximum of prompt and continuation together
    adapts_unembedding: bool  # True if LoRA on the unembedding takes effect
    adapts_experts: bool = True  # True if LoRA on experts takes effect, or the base model has none


@dataclass(frozen=True)
class Completion:
    """Response of `/v1/completions`: its only choice, and the number of cached prompt tokens."""

    choice: Mapping[str, Any]
    cached_prompt_tokens: int


class VllmServer:
    """Client of one vLLM server. For one event loop."""

    def __init__(self, url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # The callers limit the number of connections.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=TIMEOUT,
            transport=httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Return a card for the base model under each of its names, and for each adapter."""
        response = await self._send("GET", "/v1/models")
        _raise_for(response)
        return list(response.json()["data"])

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Generate one sequence. Cancelling this aborts it on the server.

        Raises:
            VllmUnavailable: the server is unavailable, or it aborted the sequence.
            VllmRefused: the request is invalid.
            AdapterUnknown: the model of the request is not loaded.
        """
        response = await self._send("POST", "/v1/completions", body)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise AdapterUnknown(_message(response))
        _raise_for(response)
        completion = parse_completion(response.content)
        if completion.choice["finish_reason"] not in ("stop", "length"):
            raise VllmUnavailable(f"aborted: {completion.choice['finish_reason']}", is_reached=True)
        return completion

    async def load(self, name: str, path: Path) -> None:
        """Load the PEFT folder at `path`, a path of the server's file system. Idempotent.

        Raises:
            VllmUnavailable: the adapter may be loaded or not.
            AdapterRefused: the server cannot load it, or LoRA or its run-time updating is off.
        """
        body = {"lora_name": name, "lora_path": str(path)}
        response = await self._send("POST", "/v1/load_lora_adapter", body)
        if response.is_success or any(card["id"] == name for card in await self.models()):
            return
        # Some versions respond 500 both if the engine cannot load the adapter and if the engine has crashed.
        _raise_for(await self._send("GET", "/health"))
        raise AdapterRefused(_message(response))

    async def unload(self, name: str) -> None:
        """Unload an adapter that no request uses. Idempotent."""
        response = await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        if response.is_server_error:
            _raise_for(response)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as refused:
            raise VllmUnavailable(f"no connection: {refused}", is_reached=False) from refused
        except httpx.TransportError as lost:
            raise VllmUnavailable(f"connection lost: {lost!r}", is_reached=True) from lost


def refusal(request: SampleRequest, facts: ServerFacts | None) -> str | None:
    """Return the reason why vLLM can never run this request, or None. Without facts, only some limits are checked."""
    if request.grammar is not None:
        return "response_format and a required tool call need the sampler of the engine, not vLLM."
    if request.images:
        return "Images in a prompt need the sampler of the engine, not vLLM."
    if request.return_routed_experts:
        return "return_routed_experts needs the sampler of the engine, not vLLM."
    length = len(request.prompt)
    if facts and length >= facts.context_tokens:
        return f"The prompt has {length} tokens; the context holds {facts.context_tokens}, one of them generated."
    targets = request.target_prompt_logprobs
    if targets is not None and ((targets >= 0) & (targets != request.prompt[1:, None])).any():
        return (
            "target_prompt_logprobs: the vLLM sampler scores the prompt's own next tokens only; "
            "use topk_prompt_logprobs, or a forward pass."
        )
    return None


def completion_body(request: SampleRequest, sequence: int, model: str, context_tokens: int) -> dict[str, Any]:
    """Return the body of the request for one sequence. The first sequence also scores the prompt.

    Every parameter is set. A missing one would be filled from the model's `generation_config.json`,
    and a missing `max_tokens` would be 16. Even for `max_tokens` 0, one token is requested.
    """
    left = context_tokens - len(request.prompt)
    body = {
        "model": model,
        "prompt": request.prompt.tolist(),
        "n": 1,
        "max_tokens": left if request.max_tokens is None else max(1, min(request.max_tokens, left)),
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed_of(f"{request.seed}:{sequence}"),
        # End-of-sequence tokens that should stop are in `stop_tokens`.
        "ignore_eos": True,
        "stop_token_ids": sorted(request.stop_tokens),
        "stop": list(request.stop_strings),
        "include_stop_str_in_output": True,
        # Stop strings are searched in the whole text.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": request.topk_sample_logprobs,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }
    if request.tenant:
        body["cache_salt"] = request.tenant  # a shared hit would reveal another tenant's prompt
    if sequence == 0 and request.scores_prompt:
        body["prompt_logprobs"] = request.topk_prompt_logprobs
    return body


def sample_output(request: SampleRequest, completions: Sequence[Completion]) -> SampleOutput:
    """Return the output of a request, combined from the responses to its sequences in order.

    Raises KeyError, TypeError or ValueError if a response does not have vLLM's format.
    """
    scores: list[Row] = []
    if request.scores_prompt:
        scores = _prompt_rows(request, completions[0].choice["prompt_logprobs"])
    last = _last_rows(request, scores)
    k = request.topk_prompt_logprobs
    return SampleOutput(
        sequences=[_sequence(request, each.choice) for each in completions],
        prompt_logprobs=_own_logprobs(request, last) if request.prompt_logprobs else None,
        topk_prompt=_top_k(last, k) if k else None,
        target_prompt_logprobs=_target_logprobs(request, scores),
        cached_prompt_tokens=completions[0].cached_prompt_tokens,
    )


def parse_completion(content: bytes) -> Completion:
    """Parse a response of `/v1/completions`. Raises KeyError, TypeError or ValueError if it is malformed."""
    answer = json.loads(content)
    (choice,) = answer["choices"]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Completion(choice, details.get("cached_tokens") or 0)


def _raise_for(response: httpx.Response) -> None:
    """Raise VllmUnavailable for a transient error, VllmRefused for a permanent one."""
    status = response.status_code
    if status in (408, 429) or response.is_server_error:
        # Statuses other than 500 come from a proxy in front of an unavailable or starting server.
        raise VllmUnavailable(f"answered {status}: {_message(response)}", is_reached=status == 500)
    if not response.is_success:
        raise VllmRefused(status, _message(response))


def _message(response: httpx.Response) -> str:
    """Return the server's error message: `{"error": {"message": ...}}`; in older versions without `error`."""
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:_MESSAGE_CHARACTERS]


def _sequence(request: SampleRequest, choice: Mapping[str, Any]) -> SampledSequence:
    k, until, answered = request.topk_sample_logprobs, request.max_tokens, choice["logprobs"]
    tokens = [_token_id(token) for token in answered["tokens"]][:until]
    rows = [
        {_token_id(token): value for token, value in row.items()}
        for row in (answered["top_logprobs"][:until] if k else ())
    ]
    return SampledSequence(
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(answered["token_logprobs"][:until], np.float32),
        stop_reason=choice["finish_reason"] if tokens else "length",
        topk=_top_k(rows, k) if k else None,
    )


def _token_id(token: str) -> int:
    if not token.startswith(_TOKEN):
        raise ValueError(f"vLLM names a token {token!r}, not by its id")
    return int(token.removeprefix(_TOKEN))


def _prompt_rows(request: SampleRequest, answered: Sequence[Mapping[str, Any] | None]) -> list[Row]:
    """Return the log-probs at each prompt position; an empty row at the first."""
    length = len(request.prompt)
    if len(answered) != length:
        raise ValueError(f"vLLM scored {len(answered)} tokens of a prompt of {length}")
    scored = [{int(token): entry["logprob"] for token, entry in (row or {}).items()} for row in answered[1:]]
    return [{}, *scored]


def _last_rows(request: SampleRequest, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with those before the last N emptied. Target log-probs still use all rows."""
    last_n = request.prompt_logprobs_last_n
    hidden = 0 if last_n is None else max(0, len(rows) - last_n)
    return [{}] * hidden + list(rows[hidden:])


def _own_logprobs(request: SampleRequest, rows: Sequence[Row]) -> np.ndarray:
    own = zip(rows, request.prompt.tolist(), strict=True)
    return np.array([row.get(token, np.nan) for row, token in own], np.float32)


def _top_k(rows: Sequence[Row], k: int) -> TopK:
    """Return the `k` best of each row. vLLM adds the actual token to a row at any rank."""
    token_ids = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), NOT_COMPUTED_LOGPROB, np.float32)
    for at, row in enumerate(rows):
        best = sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:k]
        for column, (token, logprob) in enumerate(best):
            token_ids[at, column], logprobs[at, column] = token, logprob
    return TopK(token_ids, logprobs)


def _target_logprobs(request: SampleRequest, rows: Sequence[Row]) -> np.ndarray | None:
    """Return target log-probs `[P - 1, K]`. `refusal` admits only the prompt's own tokens as targets."""
    targets = request.target_prompt_logprobs
    if targets is None:
        return None
    own = _own_logprobs(request, rows)[1:, None]
    return np.where(targets >= 0, own, np.float32(np.nan)).astype(np.float32)
