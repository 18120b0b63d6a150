"""Small HTTP server with vLLM's routes and a tiny real model, which tests can stop and break.

Its answers follow vLLM's own sources (`entrypoints/openai`, 0.11 to 0.26). It was never compared
with a real vLLM.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftModel
from transformers import AutoTokenizer
from typing_extensions import override

from tests.support.ports import free_port
from tests.support.shared_base import load_plain, twin

Answer = tuple[int, Any]


class FakeVllm:
    """One server on one port. Its attributes set its options and its failures."""

    def __init__(self, model_folder: Path, name: str) -> None:
        self.name = name
        self.api_key = ""
        self.context_tokens = 64
        self.updates_lora = True
        self.unembedding = "applied"  # or "refused", or "ignored"
        self.drops_experts = False
        self.logprobs_mode = "raw_logprobs"  # or "processed_logprobs", or "raw_logits"
        self.max_logprobs = 20
        self.answers: dict[str, list[Answer | Callable[[], Answer] | None]] = {}
        """Path → first answers to it. None is a normal answer."""
        self.may_generate = threading.Event()
        self.may_generate.set()
        self.calls: list[tuple[str, Any]] = []
        """Path and body of every request so far."""
        self.fails: dict[int, list[Answer]] = {}
        """Token → first answers to prompts that contain it."""
        self.generating = self.max_generating = self.aborted = self.most_loaded = 0
        self.pulled: list[str] = []
        """Adapters that were unloaded while a sequence used them."""
        self._using: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._model = TinyModel(model_folder)
        self._open: set[socket.socket] = set()
        self._port = free_port()  # the same after a restart

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base URL, the same after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def loaded(self) -> set[str]:
        """Names of the adapters on the server."""
        return set(self._model.adapted)

    def start(self) -> None:
        """Start, with no adapter loaded."""
        self._model.adapted.clear()
        self.is_up = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), _handler(self))
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close every connection, including those of running requests."""
        self.is_up = False
        self._server.shutdown()
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # its own thread may have closed it
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies of the requests to one path, in order."""
        return [body for called, body in self.calls if called == path]

    def wait_until(
        self, *, generating: int | None = None, aborted: int = 0, calls: int = 0, unloaded: str | None = None
    ) -> None:
        """Wait until the counts are reached: equal for `generating`, at least for `aborted` and `calls`."""

        def is_so() -> bool:
            counted = self.aborted >= aborted and len(self.calls) >= calls
            return counted and generating in (None, self.generating) and unloaded not in self.loaded

        with self._changed:
            assert self._changed.wait_for(is_so, 120)

    def text(self, tokens: list[int]) -> str:
        """Decode tokens as the server does when it looks for stop strings."""
        return str(self._model.tokenizer.decode(tokens))

    def unload(self, name: str) -> None:
        """Remove an adapter without a request."""
        del self._model.adapted[name]

    def note_call(self, path: str, body: Any) -> None:
        """Record a request."""
        self.calls.append((path, body))
        self._note()

    def _note(self, *, generating: int = 0, aborted: int = 0, model: str = "") -> None:
        with self._changed:
            self._using[model] += generating
            self.generating += generating
            self.max_generating = max(self.max_generating, self.generating)
            self.aborted += aborted
            self.most_loaded = max(self.most_loaded, len(self.loaded))
            self._changed.notify_all()

    def answer(self, path: str, body: Any, connection: socket.socket) -> Answer | None:
        """Return the answer to one request, or None if its client has disconnected."""
        if (prepared := self.answers.get(path)) and (answer := prepared.pop(0)):
            return answer() if callable(answer) else answer
        match path:
            case "/health":
                return 200, ""
            case "/v1/models":
                return 200, {"object": "list", "data": self._cards()}
            case "/v1/load_lora_adapter" if self.updates_lora:
                return self._load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter" if self.updates_lora:
                return self._unload(body["lora_name"])
            case "/v1/completions":
                return self._complete(body, connection)
        return 404, {"detail": "Not Found"}

    def _cards(self) -> list[dict[str, Any]]:
        base = {"id": self.name, "root": "/models/x", "parent": None}
        adapters = [{"id": name, "parent": self.name} for name in self._model.adapted]
        return [{**base, "max_model_len": self.context_tokens}, *adapters]

    def _load(self, name: str, path: str) -> Answer:
        if name in self._model.adapted:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            self._model.drops_experts = self.drops_experts
            self._model.load(name, path, self.unembedding)
        except OSError:
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        except ValueError as refused:
            return _error(500, str(refused))
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, name: str) -> Answer:
        with self._changed:
            self.pulled += [name] * self._using[name]
        gone = self._model.adapted.pop(name, None)
        self._note()
        return (200, "Success") if gone else _error(404, "The lora adapter cannot be found.")

    def _complete(self, body: dict[str, Any], connection: socket.socket) -> Answer | None:
        prompt, wanted = body["prompt"], body.get("max_tokens") or 16
        if body["model"] != self.name and body["model"] not in self._model.adapted:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if failures := [self.fails[token] for token in prompt if self.fails.get(token)]:
            return failures[0].pop(0)
        if not 0 <= body["temperature"] <= 2:
            return _error(400, f"temperature must be in [0, 2], got {body['temperature']}.")
        if len(prompt) + wanted > self.context_tokens:
            return _error(400, f"This model's maximum context length is {self.context_tokens}.")
        if max(body.get("logprobs") or 0, body.get("prompt_logprobs") or 0) > self.max_logprobs:
            return _error(400, f"Requested more logprobs than the allowed {self.max_logprobs}.")
        self._note(generating=1, model=body["model"])
        try:
            tokens, rows, reason = self._generate(body, prompt, wanted, connection)
        finally:
            self._note(generating=-1, model=body["model"])
        if reason == "abort":
            self._note(aborted=1)
            return None
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": reason,
            "logprobs": _logprobs(tokens, rows) if body.get("logprobs") is not None else None,
            "prompt_logprobs": self._prompt_logprobs(body),
        }
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 3}}
        return 200, {"object": "text_completion", "choices": [choice], "usage": usage}

    def _generate(
        self, body: dict[str, Any], prompt: list[int], wanted: int, connection: socket.socket
    ) -> tuple[list[int], list[dict[int, float]], str]:
        generator = torch.Generator().manual_seed(body.get("seed") or 0)
        tokens: list[int] = []
        rows: list[dict[int, float]] = []
        stops = set(body.get("stop_token_ids") or ())
        while len(tokens) < wanted:
            if not self._may_go_on(connection):
                return tokens, rows, "abort"
            logits = self._model.logits(body["model"], prompt + tokens)[-1]
            tokens.append(choose(logits, body, generator))
            rows.append(scores(self._seen(logits, body), tokens[-1], body.get("logprobs") or 0))
            text = self._model.tokenizer.decode(tokens)
            if tokens[-1] in stops or any(stop in text for stop in body.get("stop") or ()):
                return tokens, rows, "stop"
        return tokens, rows, "length"

    def _may_go_on(self, connection: socket.socket) -> bool:
        while self.is_up and not _is_gone(connection):
            if self.may_generate.wait(0.005):
                return True
        return False

    def _seen(self, logits: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
        if self.logprobs_mode == "raw_logits":
            return logits
        processed = self.logprobs_mode == "processed_logprobs" and body["temperature"]
        return torch.log_softmax(logits / (body["temperature"] if processed else 1.0), -1)

    def _prompt_logprobs(self, body: dict[str, Any]) -> Any:
        if body.get("prompt_logprobs") is None:
            return None
        prompt = body["prompt"]
        logprobs = torch.log_softmax(self._model.logits(body["model"], prompt), -1)
        rows = [
            scores(before, token, body["prompt_logprobs"])
            for before, token in zip(logprobs[:-1], prompt[1:], strict=True)
        ]
        as_json = [{str(t): {"logprob": v, "rank": 1} for t, v in row.items()} for row in rows]
        return [None, *as_json]


def _logprobs(tokens: list[int], rows: list[dict[int, float]]) -> dict[str, Any]:
    named = [{f"token_id:{t}": value for t, value in row.items()} for row in rows]
    return {
        "tokens": [f"token_id:{token}" for token in tokens],
        "token_logprobs": [row[token] for token, row in zip(tokens, rows, strict=True)],
        "top_logprobs": named,
    }


def _error(status: int, message: str) -> Answer:
    return status, {"error": {"message": message, "type": "X", "code": status}}


def _is_gone(connection: socket.socket) -> bool:
    """Return True if the client has closed its connection, which is then readable."""
    return bool(select.select([connection], [], [], 0)[0])


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        @override
        def setup(self) -> None:
            super().setup()
            fake._open.add(self.connection)

        @override
        def finish(self) -> None:
            fake._open.discard(self.connection)
            super().finish()

        def do_GET(self) -> None:
            self._serve(None)

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _serve(self, body: Any) -> None:
            fake.note_call(self.path, body)
            key = self.headers.get("Authorization", "")
            answer: Answer | None = (401, {"error": "Unauthorized"})
            if not fake.api_key or key == f"Bearer {fake.api_key}" or self.path == "/health":
                answer = fake.answer(self.path, body, self.connection)
            if answer is None:
                self.close_connection = True
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        @override
        def log_message(self, *_: object) -> None: ...

    return Handler


class TinyModel:
    """Base model and loaded adapters by name."""

    def __init__(self, folder: Path) -> None:
        self.base = base_of(folder)
        self.tokenizer = tokenizer_of(folder)
        self.adapted: dict[str, Any] = {}
        self.drops_experts = False  # loads no LoRA of experts, without an error

    def load(self, name: str, path: str, unembedding: str) -> None:
        """Load a PEFT folder. `unembedding` determines the handling of LoRA on the head.

        Raises ValueError if it is "refused" and the adapter has it, and OSError if there is no such
        folder.
        """
        config = (Path(path) / "adapter_config.json").read_text()
        has_head = "lm_head" in json.loads(config)["target_modules"]
        if has_head and unembedding == "refused":
            raise ValueError(f"While loading {path}, expected target modules in {{'q_proj'}}")
        tensors = sorted(each.read_bytes() for each in Path(path).glob("*.safetensors"))
        key = (self.base, config, *tensors, has_head and unembedding, self.drops_experts)
        if (model := _read.get(key)) is None:
            model = _read[key] = self._with_adapter(path)
            if has_head and unembedding == "ignored":
                model.base_model.model.lm_head.lora_B["default"].weight.data.zero_()
            for each, parameter in model.named_parameters():
                if self.drops_experts and ".experts." in each and "lora_B" in each:
                    parameter.data.zero_()
        self.adapted[name] = model

    def _with_adapter(self, path: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tied embeddings, and deprecated names of transformers
            return PeftModel.from_pretrained(twin(self.base), path, low_cpu_mem_usage=True)

    def logits(self, model: str, tokens: list[int]) -> torch.Tensor:
        """Return the logits after each token, fp32 `[len(tokens), vocabulary]`."""
        network = self.adapted.get(model, self.base)
        with torch.no_grad():
            logits: torch.Tensor = network(input_ids=torch.tensor([tokens])).logits[0]
        return logits


#: Models with an adapter, by everything that determines their results. A test of one server loads few.
_read: dict[tuple[Any, ...], Any] = {}


@cache
def base_of(folder: Path) -> Any:
    """Return the base model of all servers over a folder, in eval mode."""
    return load_plain(folder, torch.float32)


@cache
def tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer of a model, read once."""
    return AutoTokenizer.from_pretrained(folder)


def choose(logits: torch.Tensor, body: Mapping[str, Any], generator: torch.Generator) -> int:
    """Return a token drawn from the last position's logits `[vocabulary]`."""
    if body["temperature"] == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / body["temperature"], -1)
    ranked, order = probabilities.sort(descending=True)
    keep = ranked.cumsum(-1) - ranked < body.get("top_p", 1.0)
    if body.get("top_k", -1) > 0:
        keep[body["top_k"] :] = False
    drawn = torch.multinomial(ranked * keep, 1, generator=generator)
    return int(order[drawn])


def scores(logprobs: torch.Tensor, token: int, k: int) -> dict[int, float]:
    """Return log-probs in vLLM's order: of the token itself, then of the `k` most probable."""
    best = logprobs.topk(k).indices.tolist() if k else []
    return {each: float(logprobs[each]) for each in (token, *best)}
