"""Training with PEFT in one process, without a server; each tenant has its own fused AdamW.

`loop` trains one adapter after the other (`set_adapter`). `mixed` trains all of them in one batch with
`adapter_names`, which PEFT offers for inference. It raises in training mode, but gradients do flow in
`eval()`, and there is no dropout here. As a program, this module times the loop for `bench.through_http` in a
process of its own and prints tokens/s as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

# Per tenant int64 [sequences, length + 1]: inputs, and targets shifted by one.
Batches = Sequence[torch.Tensor]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class ByHand:
    """PEFT model with an adapter and an optimizer per tenant."""

    def __init__(self, folder: str, tenants: int, rank: int, *, dtype: torch.dtype, device: str) -> None:
        base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS)
        # Adapters in the base's dtype: PEFT's default, fp32, casts every input and is slower in bf16.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated names of transformers that PEFT uses
            self.model: Any = get_peft_model(
                base.to(device), config, adapter_name="t0", autocast_adapter_dtype=False
            ).eval()
        for tenant in range(1, tenants):
            self.model.add_adapter(f"t{tenant}", config, autocast_adapter_dtype=False)
        self._parameters = [self._parameters_of(tenant) for tenant in range(tenants)]
        self._optimizers = [torch.optim.AdamW(each, lr=1e-4, weight_decay=0.0, fused=True) for each in self._parameters]

    def loop(self, batches: Batches) -> None:
        """Train every tenant in turn: forward, backward, step."""
        for tenant, batch in enumerate(batches):
            self.model.set_adapter(f"t{tenant}")
            self._backward(batch)
            self._step(tenant)

    def switch(self, batches: Batches) -> None:
        """Run only the part of the loop that changes the adapter."""
        for tenant in range(len(batches)):
            self.model.set_adapter(f"t{tenant}")

    def mixed(self, batches: Batches, token_limit: int) -> None:
        """Train all tenants in batches of at most `token_limit` tokens, then step them one by one."""
        for each in self._parameters:
            for parameter in each:
                parameter.requires_grad_()
        names = [f"t{tenant}" for tenant, batch in enumerate(batches) for _ in batch]
        rows = torch.cat(list(batches))
        at_once = max(1, token_limit // rows.shape[1])
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            self._backward(rows[part], adapter_names=names[part])
        for tenant in range(len(batches)):
            self._step(tenant)

    def share_base(self, weights: dict[str, torch.Tensor]) -> None:
        """Replace its own copy of the base by another model's frozen weights, by their names in transformers."""
        for name, parameter in self.model.get_base_model().named_parameters():
            if "lora_" not in name:
                parameter.data = weights[name.replace("base_layer.", "")]

    def _parameters_of(self, tenant: int) -> list[torch.nn.Parameter]:
        named = self.model.named_parameters()
        return [value for name, value in named if f".t{tenant}." in name]

    def _backward(self, batch: torch.Tensor, **extra: Any) -> None:
        logits = self.model(input_ids=batch[:, :-1], use_cache=False, **extra).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        loss.backward()

    def _step(self, tenant: int) -> None:
        self._optimizers[tenant].step()
        self._optimizers[tenant].zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("tenants", "batch", "length", "rank", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hand = ByHand(args.model, args.tenants, args.rank, dtype=torch.float32, device="cpu")
    shape = args.tenants, args.batch, args.length + 1
    batches = [*torch.randint(hand.model.config.vocab_size, shape)]
    hand.loop(batches)
    began = time.perf_counter()
    for _ in range(args.steps):
        hand.loop(batches)
    elapsed = time.perf_counter() - began
    tokens = args.steps * args.tenants * args.batch * args.length
    print(json.dumps({"tokens_per_s": tokens / elapsed, "s_per_step": elapsed / args.steps}))


if __name__ == "__main__":
    main()
