"""Comparison of an export's log-probs with those of the server.

The texts are continuations that the server sampled, so their tokens are ones that the model uses. The
export computes their log-probs with plain transformers or PEFT, on a CPU, or on a running vLLM server.
"""

import os
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cotrain.errors import ExportFailed
from cotrain.export.adapter import CONFIG
from cotrain.export.base import BaseFolder, library

TEXTS, PROMPT_TOKENS, SAMPLED_TOKENS = 4, 4, 28
#: Limits of the largest difference of a log-prob, in nats: of float32 weights, and of rounded ones.
FLOAT32_LIMIT, ROUNDED_LIMIT = 1e-3, 0.25
_VLLM_KEY = "VLLM_API_KEY"
#: The first request of an adapter may compile kernels.
_TIMEOUT = httpx.Timeout(10.0, read=600.0)

Scores = Sequence[Sequence[float]]
"""Log-probs of every token but the first, for each text."""


@dataclass(frozen=True)
class Proof:
    """Comparison of two sets of log-probs, in nats per token."""

    largest: float
    mean: float
    limit: float
    tokens: int
    moved: float
    """Largest change of these log-probs by the adapter. Below the limit the comparison says little."""

    def sentence(self) -> str:
        """Return the result as one sentence."""
        return (
            f"largest difference of {self.tokens} log-probs from the server's: {self.largest:.2g} nats "
            f"(mean {self.mean:.2g}, limit {self.limit:g}); the adapter moves them by up to {self.moved:.2g}"
        )


def prompts(vocab_size: int) -> list[list[int]]:
    """Return the beginnings of the texts: random tokens, always the same."""
    draw = random.Random(0)  # noqa: S311 - no secret
    return [[draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(TEXTS)]


def compare(found: Scores, expected: Scores, unadapted: Scores, limit: float, what: str) -> Proof:
    """Compare log-probs. Raises ExportFailed, which names `what`, if a difference is above the limit."""
    far = distances(found, expected)
    moved = max(distances(unadapted, expected))
    proof = Proof(max(far), sum(far) / len(far), limit, len(far), moved)
    if not proof.largest <= limit:  # also where the limit is not a number
        raise ExportFailed(
            f"{what} is not the server's model: {proof.sentence()}. Usual causes: the base folder is another "
            "model or revision, or the server computes in 16 bits (then pass a larger --limit)"
        )
    return proof


def distances(found: Scores, expected: Scores) -> list[float]:
    """Return the absolute difference of every log-prob; infinite for one that is not a number."""
    pairs = [(a, b) for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return [abs(a - b) if abs(a - b) >= 0 else float("inf") for a, b in pairs]


def score_merged(folder: Path, texts: Sequence[Sequence[int]], progress: Callable[[int, int], None]) -> Scores:
    """Compute log-probs with the model of a folder."""
    return _scores(_load(folder), texts, progress)


def score_peft(
    base: BaseFolder, adapter: Path, texts: Sequence[Sequence[int]], progress: Callable[[int, int], None]
) -> Scores:
    """Compute log-probs with an adapter that PEFT attaches to the base model, unmerged."""
    peft = library("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied embeddings, which matter to a merge alone
        model = peft.PeftModel.from_pretrained(_load(base.path), str(adapter))
        return _scores(model, texts, progress)


def limit_of(base: BaseFolder, dtype: str | None) -> float:
    """Return the limit for the dtypes of the base model and of the export."""
    is_exact = base.dtype == "float32" and dtype in (None, "float32")
    return FLOAT32_LIMIT if is_exact else ROUNDED_LIMIT


def _load(folder: Path) -> Any:
    """Load a model in float32 if that fits into this machine's free memory, otherwise in its own dtype."""
    transformers = library("transformers")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    dtype = "float32" if 2.2 * size < _free_bytes() else "auto"
    auto = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in auto._model_mapping:  # a model with a vision tower
        auto = transformers.AutoModelForImageTextToText
    bars = transformers.utils.logging
    was_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        return auto.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    finally:
        if was_shown:
            bars.enable_progress_bar()


def _free_bytes() -> float:
    """Return this machine's available memory; infinite where the system does not report it."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) * 1024 if found else float("inf")


def _scores(model: Any, texts: Sequence[Sequence[int]], progress: Callable[[int, int], None]) -> Scores:
    torch = library("torch")
    scores = []
    with torch.no_grad():
        for number, text in enumerate(texts, 1):
            tokens = torch.tensor([text])
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0].float()
            rows = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])
            scores.append(rows[:, 0].tolist())
            progress(number, len(texts))
    return scores


# ---- vLLM --------------------------------------------------------------------------------------------


def score_on_vllm(url: str, folder: Path, texts: Sequence[Sequence[int]]) -> Scores:
    """Compute log-probs on the server. An adapter is loaded under its folder's name, and stays loaded.

    A merged model must already be served there, as the server's first model. The key is `VLLM_API_KEY`.
    Raises ExportFailed if the server cannot be reached, or refuses.
    """
    key = os.environ.get(_VLLM_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, trust_env=False) as http:
            model = _model(http, folder)
            return [_score(http, model, text) for text in texts]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ExportFailed(f"--check {url}: {error!r}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ExportFailed(f"--check {url}: the answer is not one of a vLLM server: {error!r}") from error


def _model(http: httpx.Client, folder: Path) -> str:
    served = [str(card["id"]) for card in _answer(http.get("/v1/models"))["data"]]
    if not (folder / CONFIG).exists():
        return served[0]
    name = folder.name
    if name in served:
        raise ExportFailed(
            f"--check: vLLM already serves a model named {name!r}; unload it, or export to a folder of another name"
        )
    body = {"lora_name": name, "lora_path": str(folder)}
    response = http.post("/v1/load_lora_adapter", json=body)
    if response.status_code in (404, 405):
        raise ExportFailed(
            "--check: vLLM loads no adapters, or does not see this folder: start it on this machine with "
            f"--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. It answered: {response.text[:300]}"
        )
    _refuse(response)
    return name


def _score(http: httpx.Client, model: str, text: Sequence[int]) -> list[float]:
    body = {"model": model, "prompt": list(text), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    [choice] = _answer(http.post("/v1/completions", json=body))["choices"]
    rows = choice["prompt_logprobs"][1:]
    return [float(row[str(token)]["logprob"]) for row, token in zip(rows, text[1:], strict=True)]


def _answer(response: httpx.Response) -> Any:
    _refuse(response)
    return response.json()


def _refuse(response: httpx.Response) -> None:
    if not response.is_success:
        raise ExportFailed(f"--check: vLLM answered {response.status_code}: {response.text[:300]}")
