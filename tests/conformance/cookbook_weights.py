"""Check of `tinker_cookbook.weights` on our exports. Runs as a separate program; prints JSON.

Every case has a base model and an exported adapter of random numbers. The cookbook merges or
converts the adapter, and the case reports the distance of its logits from plain PEFT on the same
folder.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tinker_cookbook.exceptions import WeightsMergeError
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from transformers import AutoModelForCausalLM

from cotrain.export.adapter import at_tinker, read_adapter, write_adapter
from cotrain_store.blobs.folder import Folder
from cotrain_workers.checkpoints.peft_folder import write_folder
from cotrain_workers.engine.model.base_model import find_targets
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, plan_layout
from tests.support.tiny_models import build_tiny

TOKENS = torch.arange(20)[None]
CASES = {
    "everything": AdapterSpec(4, seed=1),
    "body": AdapterSpec(8, seed=2, train_unembed=False),
    "unembedding": AdapterSpec(2, seed=3, train_attn=False, train_mlp=False),
}


def logits(model: Any) -> torch.Tensor:
    """Return `[tokens, vocabulary]`."""
    with torch.no_grad():
        whole: torch.Tensor = model(input_ids=TOKENS).logits[0]
    return whole


def exported(base: Path, spec: AdapterSpec, root: Path) -> Path:
    """Write a folder as a worker does."""
    targets = find_targets(AutoModelForCausalLM.from_pretrained(base))
    layout = plan_layout(spec, targets)
    flat = torch.zeros(layout.size)
    for pair in layout.views(flat).values():
        for matrix in pair:
            matrix.copy_(0.05 * torch.randn(matrix.shape))
    return root / write_folder(Folder(root), HostWeights(spec, flat), layout, str(base)).key


def merged(base: Path, folder: Path, output: Path) -> Any:
    """Merge into the base model."""
    build_hf_model(base_model=str(base), adapter_path=str(folder), output_path=str(output))
    return AutoModelForCausalLM.from_pretrained(output)


def merged_at_tinker(base: Path, folder: Path, output: Path) -> Any:
    """Merge the export with Tinker's names, as `cotrain export --tinker` writes it."""
    names = Path(f"{output}-names")
    names.mkdir()
    adapter = at_tinker(read_adapter(folder), interleaved="gpt_oss" in str(base))
    write_adapter(adapter, names)
    return merged(base, names, output)


def converted(base: Path, folder: Path, output: Path) -> Any:
    """Convert for serving, and attach with plain PEFT."""
    build_lora_adapter(base_model=str(base), adapter_path=str(folder), output_path=str(output))
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output)


def distance(make: Callable[[Path, Path, Path], Any], base: Path, folder: Path, root: Path) -> float | str:
    """Return the distance of a conversion from plain PEFT, or its error."""
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    expected = logits(plain)
    try:
        made = logits(make(base, folder, root / make.__name__))
    except WeightsMergeError as refused:
        return str(refused)
    return float((made - expected).abs().max())


def main() -> None:
    """Run every case."""
    logging.disable()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for tied in (False, True):
            base = build_tiny("qwen3", Path(name) / f"base-{tied}", tied=tied)
            for case, spec in CASES.items():
                root = Path(name) / f"{tied}-{case}"
                folder = exported(base, spec, root)
                for make in (merged, converted):
                    place = f"{'tied' if tied else 'untied'} {case} {make.__name__}"
                    found[place] = distance(make, base, folder, root)
        for family in ("qwen3_moe", "gpt_oss"):
            base = build_tiny(family, Path(name) / family)
            folder = exported(base, CASES["everything"], Path(name) / f"{family}-folder")
            found[f"{family} merged"] = distance(merged_at_tinker, base, folder, folder)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
