"""Writer of the table in docs/reference/models.md: each family of models, and the differences measured.

`make models` measures every family, in about a minute. `tests/unit/workers/engine/test_families.py` checks that the
table lists every family.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.families import Measured

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
MEASURED = ("training", "sampling", "export", "merged", "reverse_kl")
ROW = re.compile(
    r"^(?P<described>\| .* \| `(?P<family>[\w.-]+)` \| `\w+` \| [^|]* \|) (?P<cells>.*) \|\n",
    re.MULTILINE,
)
HEADER = (
    "| Family | Tiny model | `model_type` | Modules that carry LoRA | Training | Sampling | Export | Merged | Reverse KL |\n"
    "|---|---|---|---|--:|--:|--:|--:|--:|\n"
)


def model_type_of(family: str) -> str:
    """Return the `model_type` of a tiny model."""
    import transformers

    from tests.support.tiny_models import EVERY

    found: str = getattr(transformers, EVERY[family][0]).model_type
    return found


def described(family: str) -> str:
    """Return the row of a family without its last cell."""
    from cotrain_workers.engine.model.families import LLAMA, MODEL_TYPES

    kind = model_type_of(family)
    known = MODEL_TYPES[kind]
    modules = ", ".join(known.modules)
    if known.modules == LLAMA:
        modules = "those of its text model" if known.is_wrapper else "as Llama"
        modules = ", ".join(LLAMA) if kind == "llama" else modules
    return f"| {known.title} | `{family}` | `{kind}` | {modules} |"


def rows(page: str) -> dict[str, tuple[str, list[float]]]:
    """Return each family's row without its differences, and these."""
    return {
        each["family"]: (each["described"], [float(cell) for cell in each["cells"].split(" | ")])
        for each in ROW.finditer(page)
    }


def with_families(page: str, measured: Mapping[str, Measured]) -> str:
    """Return the page with a table of the differences, by family."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = ""
    for family, each in measured.items():
        cells = " | ".join(f"{getattr(each, name):.0e}" for name in MEASURED)
        table += f"{described(family)} {cells} |\n"
    return f"{before}{BEGIN}{HEADER}{table}{END}{after}"


def main() -> None:
    """Measure every family and write the page."""
    folders = ("", "client", "scheduler", "server", "workers")
    sys.path[:0] = [str(ROOT / folder) for folder in folders]
    import torch
    import transformers

    from tests.support.families import measure
    from tests.support.tiny_models import EVERY, build_tiny

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    measured = {}
    for family in EVERY:
        with TemporaryDirectory() as folder:
            model = build_tiny(family, Path(folder) / "model")
            measured[family] = measure(model, Path(folder) / "adapter")
        sys.stdout.write(f"{family:16} {measured[family]}\n")
    PAGE.write_text(with_families(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
