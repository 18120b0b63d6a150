"""Check at the start that a vLLM server serves the base model and applies adapters.

It compares outputs, because vLLM does not report its settings. A failure names the setting to change. Log-probs must be
equal at two temperatures. A small adapter, loaded from the shared folder, must change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import write_folder
from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout
from cotrain_workers.sampling.vllm.client import (
    AdapterRefused,
    AdapterUnknown,
    ServerFacts,
    VllmError,
    VllmRefused,
    VllmServer,
    VllmUnavailable,
)

log = structlog.get_logger()

#: Greatest difference of log-probs that counts as equal. It is far above the differences of bf16 kernels between
#: calls, and far below the effect of the probe adapters.
NOISE = 0.05
_PROMPT = list(range(1, 17))
_ATTENTION_PROBE = AdapterSpec(rank=8, seed=0, train_mlp=False, train_unembed=False)
_UNEMBEDDING_PROBE = AdapterSpec(rank=8, seed=0, train_attn=False, train_mlp=False)
_EXPERTS_PROBE = AdapterSpec(rank=8, seed=0, train_attn=False, train_unembed=False)


class VllmUnusable(VllmError):
    """A vLLM server answers, but is not suitable for sampling. The message is for the operator."""


async def check_server(server: VllmServer, base_model: str, targets: Sequence[Target], shared: Path) -> ServerFacts:
    """Return the facts of a server that can sample for this base model.

    `shared` is a folder with the same path on both sides. Two probe adapters are written there.

    Raises:
        VllmUnavailable: the server does not answer, or not yet.
        VllmUnusable: the server was not started as docs/operate/vllm.md describes.
    """
    try:
        card = base_card(base_model, await server.models())
        probes = _Probes(server, card["id"], base_model, shared)
        await probes.check_logprobs()
        await probes.check_adapters(targets)
        unembedding = await probes.adapts(_UNEMBEDDING_PROBE, targets)
        of_experts = [target for target in targets if target.experts]
        experts = not of_experts or await probes.adapts(_EXPERTS_PROBE, of_experts)
        return ServerFacts(card["id"], int(card["max_model_len"]), unembedding, experts)
    except VllmRefused as refused:
        is_wrong_key = refused.status == 401
        hint = " Is COTRAIN_VLLM_API_KEY the key it was started with?" if is_wrong_key else ""
        raise VllmUnusable(f"vLLM answers {refused.status}: {refused}.{hint}") from refused
    except AdapterUnknown as unknown:  # the check of another worker has unloaded the same probe
        raise VllmUnavailable(f"lost a probe: {unknown}", is_reached=False) from unknown
    except (KeyError, TypeError, ValueError) as error:
        raise VllmUnusable(f"The server does not answer as a supported vLLM does: {error!r}.") from error
    except OSError as error:
        raise VllmUnusable(f"No adapter can be written to {shared}: {error}.") from error


def base_card(base_model: str, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of the base model in a server's list of models (`GET /v1/models`).

    Entries with a parent are adapters. Raises VllmUnusable if the server has another base model.
    """
    bases = [card for card in cards if not card.get("parent")]
    for card in bases:
        if base_model in (card["id"], card.get("root")):
            return card
    names = ", ".join(str(card["id"]) for card in bases) or "nothing"
    raise VllmUnusable(
        f"vLLM serves {names}, and this pool's base model is {base_model}. Start it with this model, "
        f"or with --served-model-name {base_model} if it is the same one."
    )


@dataclass(frozen=True)
class _Probes:
    """Requests that show by their log-probs how a server computes."""

    server: VllmServer
    model: str  # name that the base model is served under
    base_model: str
    shared: Path

    async def check_logprobs(self) -> None:
        """Raise VllmUnusable unless log-probs are those of the raw model.

        These are equal at any temperature, and their probabilities sum to at most 1.
        """
        found = []
        # 2.0 is the highest temperature that vLLM accepts; 0.5 changes the distribution as much in the other direction.
        for temperature in (0.5, 2.0):
            choice = await self._complete(self.model, temperature=temperature, logprobs=5)
            rows = choice["logprobs"]["top_logprobs"]
            found.append(np.array(sorted(rows[0].values(), reverse=True)[:5]))
        cold, hot = found
        if np.abs(cold - hot).max() > NOISE or np.exp(cold).sum() > 1 + NOISE:
            raise VllmUnusable("vLLM's log-probs are not the raw model's. Start it with --logprobs-mode raw_logprobs.")

    async def check_adapters(self, targets: Sequence[Target]) -> None:
        """Raise VllmUnusable unless the server can load an adapter from the shared folder and applies it."""
        try:
            has_effect = await self._has_effect(_ATTENTION_PROBE, targets)
        except AdapterRefused as refused:
            raise VllmUnusable(
                f"vLLM cannot load an adapter from {self.shared}: {refused}. Start it with --enable-lora, and with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment. It must see that folder under the same "
                "path, and be allowed to read it."
            ) from refused
        if not has_effect:
            raise VllmUnusable("vLLM loads adapters, but they change nothing.")

    async def adapts(self, spec: AdapterSpec, targets: Sequence[Target]) -> bool:
        """Return True if LoRA on `lm_head` or on experts works. vLLM supports it for some models only.

        Other models reject such an adapter. vLLM may also load it without an error and ignore that part. This happens
        if the head is tied to the embeddings, or if vLLM expects other names of experts.
        """
        try:
            return await self._has_effect(spec, targets)
        except AdapterRefused as refused:
            log.info("vllm_refuses_a_probe", reason=str(refused), probe=str(spec))
            return False

    async def _has_effect(self, spec: AdapterSpec, targets: Sequence[Target]) -> bool:
        """Load a probe adapter and return True if it changes the prompt's log-probs."""
        layout = plan_layout(spec, targets)
        flat, generator = initial_weights(spec, layout), torch.Generator().manual_seed(spec.seed)
        for pair in layout.views(flat).values():  # B is random instead of zero, so that the effect is large
            pair.b.copy_(0.5 * torch.randn(pair.b.shape, generator=generator))
        folder = write_folder(Folder(self.shared), HostWeights(spec, flat), layout, self.base_model)
        await self.server.load(folder.digest, self.shared / folder.key)
        try:
            plain, adapted = [await self._scores(name) for name in (self.model, folder.digest)]
        finally:
            await self.server.unload(folder.digest)
        return bool(np.abs(plain - adapted).max() > NOISE)

    async def _scores(self, model: str) -> np.ndarray:
        """Return the log-probs of the prompt's tokens. The first token has none."""
        rows = (await self._complete(model, prompt_logprobs=0))["prompt_logprobs"]
        own = zip(_PROMPT, rows, strict=True)
        return np.array([row[str(token)]["logprob"] for token, row in own if row])

    async def _complete(self, model: str, **more: Any) -> Mapping[str, Any]:
        """Return the response to the probe's prompt, at temperature 0 if `more` has no other."""
        fixed = {"max_tokens": 1, "temperature": 0.0, "seed": 0, "ignore_eos": True}
        body = {"model": model, "prompt": _PROMPT, **fixed, "return_tokens_as_token_ids": True}
        return (await self.server.complete(body | more)).choice
