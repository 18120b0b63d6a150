"""Served API with a worker that follows a test's script, token by token, through the real store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import uvicorn
from tokenizers import Tokenizer

from cotrain_server.app import create_app
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.disk.stored_results import CANCELLED
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.sampling.claims import ClaimedSample
from cotrain_store.sampling.token_stream import StreamedTokens, TokenPublisher
from cotrain_workers.sample_output import encode_sample_output
from tests.support.http_api import ALICE, BOB, POOL
from tests.support.stand_in import StandIn, output, stand_in
from tests.support.tiny_tokenizers import trained_tokenizer

(EOS,) = POOL.eos_token_ids
CACHED_TOKENS = 1
VOCABULARY = Tokenizer.from_str(trained_tokenizer(POOL.vocab_size))
CHAT_TEMPLATE = """{% for m in messages %}{{ m.role[0] }}:{{ m.content }}
{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}a:{{ mood }}{% endif %}"""


@dataclass
class Script:
    """Script of the worker for the requests that it receives."""

    text: str = "Hello"
    tokens: tuple[int, ...] | None = None
    """Tokens of the answer in place of those of the text."""
    failure: str = ""
    lost: frozenset[int] = frozenset()
    """Positions of tokens that are not streamed before the result."""
    is_holding: bool = False
    """True to leave requests unanswered, until their clients cancel them."""
    cut_at: int | None = None
    """Number of tokens after which the context is full."""
    seen: list[SampleBody] = field(default_factory=list)
    vocabulary: Tokenizer = VOCABULARY
    cancelled: int = 0
    """Number of requests that their clients cancelled."""
    _news: threading.Condition = field(default_factory=threading.Condition)

    def note(self, body: SampleBody) -> None:
        """Record a received request."""
        with self._news:
            self.seen.append(body)
            self._news.notify_all()

    def note_cancelled(self) -> None:
        """Count a request that its client cancelled."""
        with self._news:
            self.cancelled += 1
            self._news.notify_all()

    def wait_for(self, seen: int = 0, cancelled: int = 0) -> None:
        """Wait until at least `seen` requests have arrived, and `cancelled` were cancelled."""

        def is_so() -> bool:
            return len(self.seen) >= seen and self.cancelled >= cancelled

        with self._news:
            assert self._news.wait_for(is_so, timeout=120)


@dataclass(frozen=True)
class Talking:
    """Running server with the script of its worker."""

    address: str
    services: Services
    script: Script


@contextlib.contextmanager
def talking_api(redis_url: str, folder: Path, vocabulary: Tokenizer = VOCABULARY, **changes: Any) -> Iterator[Talking]:
    """Serve the API on a free port, with a worker that follows a script."""
    write_language(folder, vocabulary=vocabulary)
    settings = ServerSettings.model_validate(
        {"redis_url": redis_url, "data_dir": folder, "api_keys": (ALICE, BOB), "disk_reserve_bytes": 0, **changes}
    )
    app, script = create_app(settings), Script(vocabulary=vocabulary)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    with in_thread(server.run, lambda: setattr(server, "should_exit", True)) as thread:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        services = app.state.services
        with stand_in(services) as worker, open_sync_connection(redis_url) as redis:
            talker = Talker(worker, TokenPublisher(redis), script)
            with in_thread(talker.run, talker.stop):
                yield Talking(address, services, script)


def ids(text: str) -> list[int]:
    """Return the tokens of a text."""
    tokens: list[int] = VOCABULARY.encode(text).ids
    return tokens


def write_language(folder: Path, template: str | None = CHAT_TEMPLATE, vocabulary: Tokenizer = VOCABULARY) -> None:
    """Write the tokenizer files of a worker's model."""
    tokenizer = folder / "tokenizers" / POOL.tokenizer
    tokenizer.mkdir(parents=True, exist_ok=True)
    vocabulary.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (tokenizer / "chat_template.jinja").write_text(template)


class Talker:
    """Loop of the worker."""

    def __init__(self, worker: StandIn, publisher: TokenPublisher, script: Script) -> None:
        self._worker = worker
        self._publisher = publisher
        self._script = script
        self._is_stopped = False

    def run(self) -> None:
        """Answer requests until `stop` is called."""
        while not self._is_stopped:
            self._worker.execution.wait(0.02)
            for claimed in self._worker.claim():
                self._answer(claimed)
            for request in self._worker.sampling.cancelled():
                self._worker.sampling.resolve({request: CANCELLED}, {})
                self._script.note_cancelled()

    def stop(self) -> None:
        """End the loop."""
        self._is_stopped = True

    def _answer(self, claimed: ClaimedSample) -> None:
        script, body = self._script, claimed.body
        assert body is not None
        script.note(body)
        if script.failure:
            self._worker.fail(claimed.request, script.failure)
        elif not script.is_holding:
            self._say(claimed.request, body)

    def _say(self, request: RequestId, body: SampleBody) -> None:
        tokens, reason = spoken(self._script, body)
        for place, token in enumerate(tokens if body.stream else []):
            if place not in self._script.lost:
                new = (place, (token,), (-float(token),))
                events = [StreamedTokens(each, *new) for each in range(body.num_samples)]
                self._publisher.publish(request, events)
        length = len(body.prompt)
        prompt_logprobs = np.asarray([np.nan, *(-float(t) for t in body.prompt[1:])], np.float32)
        whole: Any = output(
            *[tokens] * body.num_samples,
            stop_reason=reason,
            cached_prompt_tokens=CACHED_TOKENS,
            prompt_logprobs=prompt_logprobs if body.prompt_logprobs else None,
            topk_prompt=likeliest([0] * length, body.topk_prompt_logprobs),
        )
        for sequence in whole.sequences:
            sequence.topk = likeliest(tokens, body.topk_sample_logprobs)
        result = Result(ResultKind.SAMPLE, encode_sample_output(whole))
        self._worker.sampling.resolve({request: result}, {})


def spoken(script: Script, body: SampleBody) -> tuple[list[int], Literal["stop", "length"]]:
    """Return the tokens that a decoder would give for the script's text, with the stop reason."""
    vocabulary = script.vocabulary
    tokens = list(script.tokens or vocabulary.encode(script.text, add_special_tokens=False).ids)
    for count in range(1, len(tokens) + 1):
        said = vocabulary.decode(tokens[:count])
        if any(str(stop) in said for stop in body.stop or ()):
            return tokens[:count], "stop"
        if count in (body.max_tokens, script.cut_at):
            return tokens[:count], "length"
    return [*tokens, EOS], "stop"


def likeliest(tokens: Sequence[int], k: int) -> Any:
    """Return top-k lists in which each token is the likeliest, followed by 1, 2, …"""
    if not k:
        return None
    ids = [[token, *range(1, k)] for token in tokens]
    logprobs = [[-0.5 - rank for rank in range(k)] for _ in tokens]
    return SimpleNamespace(
        token_ids=np.asarray(ids, np.int32).reshape(-1, k), logprobs=np.asarray(logprobs, np.float32).reshape(-1, k)
    )


@contextlib.contextmanager
def in_thread(run: Any, stop: Any) -> Iterator[threading.Thread]:
    """Run a function in a thread until the end of the block."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        stop()
        thread.join()
