"""Check of an export on a running vLLM server: load it there, and compare its log-probs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from cotrain.errors import ExportFailed
from cotrain.export.adapter import CONFIG
from cotrain.export.scores import Scores

KEY_VARIABLE = "VLLM_API_KEY"
#: The first request of an adapter may compile kernels.
TIMEOUT = httpx.Timeout(10.0, read=600.0)


def score_on_vllm(url: str, folder: Path, texts: Sequence[Sequence[int]]) -> Scores:
    """Compute log-probs on the server. An adapter is loaded under its folder's name, and stays loaded.

    A merged model must already be served there, as the server's first model. The key is `VLLM_API_KEY`.
    Raises ExportFailed if the server cannot be reached, or refuses.
    """
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, trust_env=False) as http:
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
