"""Download a checkpoint, merge it into its base model, and ask all of them the same.

Run as `python take_home.py BASE_MODEL WEIGHTS_PATH SAMPLER_PATH`; prints a JSON object: whose → the
log-probs of one sequence.
"""

from __future__ import annotations

import json
import sys
import tempfile

import tinker
import torch
import transformers
from tinker_cookbook import weights

TEXT = "<|im_start|>user\nHow many lamps?<|im_end|>\n<|im_start|>assistant\n\\boxed{3}<|im_end|>"


def main(base_model: str, weights_path: str, sampler_path: str) -> None:
    """Compare a merged model with the server's sampler, and with the base model."""
    tokens = transformers.AutoTokenizer.from_pretrained(base_model).encode(TEXT)
    with tempfile.TemporaryDirectory() as folder:
        adapter = weights.download(tinker_path=weights_path, output_dir=f"{folder}/adapter")
        merged = f"{folder}/merged"
        weights.build_hf_model(base_model=base_model, adapter_path=adapter, output_path=merged)
        logprobs = {
            "merged": logprobs_of(merged, tokens),
            "base": logprobs_of(base_model, tokens),
            "sampled": sampler_logprobs(sampler_path, tokens),
        }
    print(json.dumps(logprobs))


def logprobs_of(model: str, tokens: list[int]) -> list[float]:
    """Score every token but the first by plain transformers."""
    causal = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = causal(ids).logits.log_softmax(-1)[0, :-1]  # [tokens - 1, vocabulary]
    chosen: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return chosen


def sampler_logprobs(path: str, tokens: list[int]) -> list[float]:
    """Score them by the server."""
    with tinker.ServiceClient() as service:
        sampler = service.create_sampling_client(model_path=path).result()
        scores: list[float] = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()[1:]
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:])
