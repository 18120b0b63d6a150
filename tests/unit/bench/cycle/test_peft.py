from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.cycle.load import Load
from bench.cycle.peft import ByHand, as_torch_comes, weights_of
from bench.support.model import build
from cotrain_workers.engine.engine import Engine

LOAD = Load(6, 24, (3,))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("model"), "tiny")


def by_hand(model: Path) -> ByHand:
    torch.manual_seed(0)  # PEFT draws its A from here
    return ByHand(str(model), 3, 16, dtype=torch.float32, device="cpu")


def trained(hand: ByHand, tenant: int) -> torch.Tensor:
    """Return every B of a tenant, which started as zero."""
    named = hand.model.named_parameters()
    chosen = [p for name, p in named if "lora_B" in name and f".t{tenant}." in name]
    return torch.cat([p.detach().flatten() for p in chosen])


@pytest.mark.parametrize("token_limit", [24, 1000])
def test_the_mixed_batch_trains_every_tenant_like_the_loop(model: Path, token_limit: int) -> None:
    loop, mixed = by_hand(model), by_hand(model)
    batches = LOAD.batches(3, 128, "cpu")

    loop.loop(batches)
    mixed.mixed(batches, token_limit)

    for tenant in range(3):
        # AdamW's first step is the sign of the gradient, so only signs near zero may differ.
        ours, theirs = trained(loop, tenant), trained(mixed, tenant)
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999
    assert torch.cosine_similarity(trained(loop, 0), trained(loop, 1), dim=0) < 0.9


def test_both_use_one_copy_of_the_base(model: Path) -> None:
    hand, engine = by_hand(model), Engine.load(str(model))
    ids = LOAD.batches(3, 128, "cpu")[0]
    before = hand.model(input_ids=ids, use_cache=False).logits
    weights = weights_of(engine)

    hand.share_base(weights)

    assert torch.equal(hand.model(input_ids=ids, use_cache=False).logits, before)
    ours = {weight.data_ptr() for weight in weights.values()}
    named = hand.model.named_parameters()
    assert {p.data_ptr() for name, p in named if "lora_" not in name} == ours


def test_peft_is_timed_without_our_slower_kernels_which_are_restored() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise torch.OutOfMemoryError

    torch.use_deterministic_algorithms(mode=True)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            as_torch_comes(work)()

        assert seen == [False]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)
