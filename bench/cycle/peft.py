"""Training with PEFT in one process, without a server, and its comparison with a mixed engine cycle.

As a program, this module times the loop for `bench.through_http` in a process of its own and prints tokens/s as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bench.cycle.load import RANK, Load, create_runs, cycle
from bench.support.timing import Work, fastest, timed
from cotrain_workers.engine.engine import Engine

#: Per tenant int64 [sequences, length + 1]: inputs, and targets shifted by one.
Batches = Sequence[torch.Tensor]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class ByHand:
    """PEFT model with an adapter and a fused AdamW per tenant.

    `loop` trains one adapter after the other (`set_adapter`). `mixed` trains all of them in one batch with
    `adapter_names`, which PEFT offers for inference. It raises in training mode, but gradients do flow in
    `eval()`, and there is no dropout here.
    """

    def __init__(self, folder: str, tenants: int, rank: int, *, dtype: torch.dtype, device: str) -> None:
        base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS)
        # Adapters in the base's dtype: PEFT's default, fp32, casts every input and is slower in bf16.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated names of transformers that PEFT uses
            model: Any = get_peft_model(base.to(device), config, adapter_name="t0", autocast_adapter_dtype=False)
        self.model = model.eval()
        for tenant in range(1, tenants):
            self.model.add_adapter(f"t{tenant}", config, autocast_adapter_dtype=False)
        named = [*self.model.named_parameters()]
        self._parameters = [[value for name, value in named if f".t{at}." in name] for at in range(tenants)]
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

    def _backward(self, batch: torch.Tensor, **extra: Any) -> None:
        logits = self.model(input_ids=batch[:, :-1], use_cache=False, **extra).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
        loss.backward()

    def _step(self, tenant: int) -> None:
        self._optimizers[tenant].step()
        self._optimizers[tenant].zero_grad()


def measure_by_hand(
    model: Path, load_engine: Callable[[], Engine], load: Load, *, dtype: torch.dtype, device: str,
    mixed_tokens: int, rounds: int, until: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time our cycle and PEFT's ways in alternation, for each number of tenants.

    PEFT is loaded first, so that an engine which measures free memory leaves PEFT its own. Then both share one
    copy of the base model. A way that runs out of memory is listed in `out_of_memory` and has no times.
    """
    rows: list[dict[str, Any]] = []
    for tenants in load.tenants:
        if rows and time.monotonic() > until:
            break
        hand = ByHand(str(model), tenants, RANK, dtype=dtype, device=device)
        batches = load.batches(tenants, hand.model.config.vocab_size, device)
        ways: dict[str, Work] = {
            "loop": as_torch_comes(partial(hand.loop, batches)),
            "mixed": as_torch_comes(partial(hand.mixed, batches, mixed_tokens)),
            "switch": partial(hand.switch, batches),  # share of the loop that is PEFT's bookkeeping
        }
        lost = [name for name, way in ways.items() if not _fits(way, device)]
        engine = load_engine()
        hand.share_base(weights_of(engine))
        create_runs(engine, tenants)
        ways = {"ours": cycle(engine, load, tenants)} | {name: ways[name] for name in ways if name not in lost}
        took = fastest(ways, device, rounds=rounds, until=until)
        rows.append(_row_of(load, tenants, took) | {"out_of_memory": lost})
        del ways, engine, hand
        forget(device)
    return rows


def _row_of(load: Load, tenants: int, took: dict[str, Any]) -> dict[str, Any]:
    """Return our times, and PEFT's times divided by ours: above 1, ours is faster."""
    ours = took["ours"]
    row = {
        "tenants": tenants, "length": load.length, "tokens": load.tokens, "tokens_per_s": load.tokens / ours.wall_s,
        "wall_s": ours.wall_s, "cpu_s": ours.cpu_s,
    }  # fmt: skip
    for name in took.keys() - {"ours"}:
        row |= {
            f"{name}_wall_s": took[name].wall_s, f"{name}_cpu_s": took[name].cpu_s,
            f"over_{name}": took[name].wall_s / ours.wall_s, f"over_{name}_cpu": took[name].cpu_s / ours.cpu_s,
        }  # fmt: skip
    return row


def _fits(work: Work, device: str) -> bool:
    try:
        timed(work, device)
    except torch.OutOfMemoryError:
        forget(device)
        return False
    return True


def as_torch_comes(work: Work) -> Work:
    """Return the same work without the deterministic kernels that the engine enables, as they are slower."""
    matmul = torch.backends.cuda.matmul

    def run() -> None:
        was = torch.are_deterministic_algorithms_enabled()
        reduced = matmul.allow_bf16_reduced_precision_reduction
        torch.use_deterministic_algorithms(mode=False)
        matmul.allow_bf16_reduced_precision_reduction = True
        try:
            work()
        finally:
            torch.use_deterministic_algorithms(mode=was)
            matmul.allow_bf16_reduced_precision_reduction = reduced

    return run


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return an engine's frozen weights by their names in transformers."""
    base = engine._base  # private, as only this bench needs the weights
    named = {f"model.{name}": value for name, value in base.backbone.state_dict().items()}
    return named | {"lm_head.weight": base.head_weight}


def forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("tenants", "batch", "length", "rank", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hand = ByHand(args.model, args.tenants, args.rank, dtype=torch.float32, device="cpu")
    batches = [*torch.randint(hand.model.config.vocab_size, (args.tenants, args.batch, args.length + 1))]
    hand.loop(batches)
    elapsed = sum(timed(partial(hand.loop, batches), "cpu") for _ in range(args.steps))
    tokens = args.steps * args.tenants * args.batch * args.length
    print(json.dumps({"tokens_per_s": tokens / elapsed, "s_per_step": elapsed / args.steps}))


if __name__ == "__main__":
    main()
