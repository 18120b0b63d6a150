"""What one would do by hand: PEFT, one adapter after the other, in one process, no server.

Run by `bench.through_http` in a process of its own; prints tokens/s as JSON. Each tenant has its own
adapter and its own fused AdamW; a step is forward, backward and optimizer step over its batch.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.model import VOCAB

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = LoraConfig(r=args.rank, lora_alpha=32, target_modules=TARGETS)
    model = get_peft_model(base, config, adapter_name="t0")
    for tenant in range(1, args.tenants):
        model.add_adapter(f"t{tenant}", config)
    optimizers, batches = [], []
    for tenant in range(args.tenants):
        model.set_adapter(f"t{tenant}")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True))
        rng = np.random.default_rng(tenant)
        batches.append(torch.from_numpy(rng.integers(0, VOCAB, (args.batch, args.length + 1))))

    def step() -> None:
        for tenant, ids in enumerate(batches):
            model.set_adapter(f"t{tenant}")
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            )
            loss.backward()
            optimizers[tenant].step()
            optimizers[tenant].zero_grad()

    step()
    began = time.perf_counter()
    for _ in range(args.steps):
        step()
    elapsed = time.perf_counter() - began
    tokens = args.steps * args.tenants * args.batch * args.length
    print(json.dumps({"tokens_per_s": tokens / elapsed, "s_per_step": elapsed / args.steps}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("tenants", "batch", "length", "rank", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
