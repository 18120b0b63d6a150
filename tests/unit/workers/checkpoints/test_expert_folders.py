"""Folders of adapters with experts, compared with plain PEFT: values, gradients, and round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, FolderUnreadable, key_of, read_folder, write_folder
from cotrain_workers.engine.adapters.peft_import import DOWN, GATE_UP, of_parameter, parameter_names
from cotrain_workers.engine.ops import Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.shared_base import load_plain
from tests.support.training import ModelFolder, NewEngine, random_datum, relative_error

SPECS = {
    "shared": AdapterSpec(5, seed=1, alpha=7.5),
    "own": AdapterSpec(4, seed=2, train_unembed=False, per_expert=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("family", [*SOME[:2], variant(SOME[2])])
def test_plain_peft_has_the_values_and_gradients_of_a_folder(
    new_engine: NewEngine, model_folder: ModelFolder, tmp_path: Path, family: str, kind: str
) -> None:
    engine, spec = new_engine(family), SPECS[kind]
    weights = random_weights(engine, kind, spec)
    layout = engine.adapters[kind].layout
    written = write_folder(Folder(tmp_path), weights, layout, family)

    found = read_folder(Folder(tmp_path), written.digest, engine.adapters.layout_of)
    assert found.spec == spec
    assert found.flat.numpy().tobytes() == weights.flat.numpy().tobytes()

    datum = random_datum(np.random.default_rng(0), "cross_entropy", 40)
    output = engine.run([Pass(kind, 1, [datum], "cross_entropy", {}, needs_grad=True)])
    ours = output.outputs[kind, 1]
    assert isinstance(ours, PassOutput)
    network: Any = load_plain(model_folder(family), torch.float32)
    network.set_experts_implementation("eager")
    folder = tmp_path / key_of(written.digest)
    plain: Any = PeftModel.from_pretrained(network, folder, is_trainable=True)
    logits = plain(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
    logprobs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0]
    assert np.abs(logprobs.detach().numpy() - ours.logprobs[0]).max() < 1e-5

    (-logprobs * torch.from_numpy(datum.inputs["weights"])).sum().backward()
    theirs = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    }
    assert theirs.keys() == load_file(folder / TENSORS).keys()
    grads = layout.views(engine.adapters.state(kind).grads)
    stored = load_file(folder / TENSORS)
    for module, target in layout.gate_by_experts.items():
        for parameter in (GATE_UP, DOWN):
            name_a, name_b = parameter_names(module, parameter)
            a, b = theirs[name_a], theirs[name_b]
            b = b.where(stored[name_b] != 0, 0)  # PEFT would train the zero blocks, too
            for name, pair in of_parameter(parameter, a, b, target, in_halves=True).items():
                for mine, each in zip(grads[f"{module}.{name}"], pair, strict=True):
                    # The gradient of a matrix that the experts share is the sum of theirs.
                    expected = each.sum(dim=0, keepdim=True) if len(mine) == 1 else each
                    assert relative_error(mine, expected) < 1e-5, (module, name)


def test_a_changed_copy_of_a_shared_matrix_is_refused(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("qwen3_moe")
    weights = random_weights(engine, "shared", SPECS["shared"])
    layout = engine.adapters["shared"].layout
    written = write_folder(Folder(tmp_path), weights, layout, "base")
    folder = tmp_path / key_of(written.digest)
    config = json.loads((folder / CONFIG).read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["rank_pattern"] == {"experts.gate_up_proj": 10}
    assert config["alpha_pattern"] == {"experts.gate_up_proj": 15.0}

    content = bytearray((folder / TENSORS).read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    fields = json.loads(content[8:length])
    name = parameter_names("model.layers.0.mlp.experts", GATE_UP)[0]
    content[length + fields[name]["data_offsets"][1] - 1] ^= 1  # in the last expert
    (folder / TENSORS).write_bytes(content)

    with pytest.raises(FolderUnreadable, match="the experts have different matrices"):
        read_folder(Folder(tmp_path), written.digest, engine.adapters.layout_of)
