"""README.md of an export: a model card for the hub, with the result of the comparison."""

import json
from collections.abc import Sequence

from cotrain.export.adapter import Adapter
from cotrain.export.base import BaseFolder

_LOAD = {
    "merged": """from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("FOLDER")""",
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER")""",
    "tinker": """from tinker_cookbook.weights import build_hf_model
build_hf_model(base_model="BASE", adapter_path="FOLDER", output_path="merged")""",
    "gguf": """llama-server --model BASE.gguf --lora FOLDER/adapter.gguf""",
}


def card(kind: str, path: str, base: BaseFolder, base_model: str, adapter: Adapter, notes: Sequence[str]) -> str:
    """Return the text of the card. `kind` is merged, adapter, tinker or gguf; `notes` are sentences."""
    library = {"merged": "transformers", "adapter": "peft", "gguf": "gguf", "tinker": "peft"}[kind]
    targets = ", ".join(sorted({name.rpartition(".")[2] for name in adapter.matrices}))
    load = _LOAD[kind].replace("BASE", base_model)
    language = "sh" if kind == "gguf" else "python"
    head = f"library_name: {library}\nbase_model: {json.dumps(base_model)}\ntags: [lora, cotrain]"
    relation = "merge" if kind == "merged" else "adapter"
    facts = "\n".join(f"* {note}" for note in notes)
    return f"""---
{head}
base_model_relation: {relation}
---

# {path.rpartition("/")[2]}

LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets} of {base_model} ({base.family}).
Trained with cotrain; checkpoint `{path}`.

{facts}

```{language}
{load}
```

The licence of the base model applies.
"""
