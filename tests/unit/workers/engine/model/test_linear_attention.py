"""One layer with a state: packed sequences compared with transformers on each of them, and with each alone."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BambaConfig, Lfm2Config, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from cotrain_workers.engine.model import linear_attention
from cotrain_workers.engine.routing import SequenceTable, bucket
from tests.support.tiny_models import HYBRIDS

CPU = torch.device("cpu")
WIDTH = 24
LENGTHS = (1, 200, 3, 64, 65, 2, 12)  # of blocks of 8 to 64, and around the three tokens of the convolution
#: Layer of transformers, its configuration, and its name in a decoder layer.
KINDS: dict[str, tuple[Any, Any, str]] = {
    "qwen3_next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig, "linear_attn"),
    "qwen3_5": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig, "linear_attn"),
    "bamba": (BambaMixer, BambaConfig, "mamba"),
    "lfm2": (Lfm2ShortConv, Lfm2Config, "conv"),
}


def nets(kind: str) -> tuple[Any, Any]:
    """Return a random layer of transformers, and ours with the same weights."""
    torch.manual_seed(0)
    layer, config, name = KINDS[kind]
    settings = {**HYBRIDS[kind][1], "hidden_size": WIDTH, "num_hidden_layers": 2}
    theirs = layer(config(**settings), 0).eval()
    theirs.requires_grad_(requires_grad=False)
    ours = deepcopy(theirs)
    router: Any = SimpleNamespace(step=None)
    linear_attention.attach(SimpleNamespace(layers=[SimpleNamespace(**{name: ours})]), router)
    return theirs, ours


def computed(net: Any, x: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return the output of packed sequences `[T, d]`, and the gradient of `x` for varying output gradients.

    Ours gets a row padded as by the engine.
    """
    size = len(x)
    if hasattr(net, "cotrain_router"):
        filler = bucket(size) - size
        x = torch.cat([x, x.new_zeros(filler, WIDTH)])
        table = SequenceTable((*lengths, *[filler] * (filler > 0)), CPU)
        net.cotrain_router.route = SimpleNamespace(sequences=table)
    given = x.clone().requires_grad_()
    out = net(given[None])[0]
    out[:size].backward(torch.linspace(-1, 1, sum(LENGTHS) * WIDTH).view(-1, WIDTH)[:size].to(x.dtype))
    assert given.grad is not None
    return out[:size].detach(), given.grad[:size]


@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_do_not_share_a_state(kind: str) -> None:
    theirs, ours = nets(kind)
    sequences = torch.randn(sum(LENGTHS), WIDTH).split(LENGTHS)
    # Each sequence begins the row once, so that it has the same output gradients as alone.
    for number, first in enumerate(sequences):
        others = [*sequences[:number], *sequences[number + 1 :]]
        lengths = (len(first), *map(len, others))

        packed = computed(ours, torch.cat([first, *others]), lengths)
        alone = computed(ours, first, (len(first),))
        plain = computed(theirs, first, (len(first),))

        for mixed, own, expected in zip(packed, alone, plain, strict=True):
            assert torch.equal(mixed[: len(first)], own)
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.numerics
def test_a_sequence_of_nan_changes_no_neighbour() -> None:
    _, ours = nets("qwen3_next")
    x = torch.randn(90, WIDTH)
    lengths = (20, 30, 40)
    expected = computed(ours, x, lengths)
    x[20:50] = torch.nan

    found = computed(ours, x, lengths)

    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before[:20], after[:20])
        assert torch.equal(before[50:], after[50:])
        assert after[20:50].isnan().any()


def test_results_of_16_bits_are_those_of_a_wide_convolution() -> None:
    theirs, ours = (net.bfloat16() for net in nets("qwen3_5"))
    x = torch.randn(70, WIDTH).bfloat16()
    wide = deepcopy(theirs).float()

    mine, plain = (computed(net, x, (70,))[0].float() for net in (ours, theirs))
    exact = computed(wide, x.float(), (70,))[0]

    assert (mine - exact).abs().max() <= 1.5 * (plain - exact).abs().max()
