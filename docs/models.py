"""Writer of the table in docs/reference/models.md: each family of models, and the differences measured.

`make models` measures every family, in about a minute. `tests/unit/workers/engine/test_families.py` checks that the
table lists every family.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.families import Measured

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
MEASURED = ("training", "sampling", "export", "merged", "reverse_kl")
ROW = re.compile(r"^(\| [^|]+ \| `\w+` \| [^|]+ \|) ([\d.]+) \|$", re.MULTILINE)
HEADER = "| Family | `model_type` | Modules that carry LoRA | Largest difference, 1e-6 |\n|---|---|---|--:|\n"


def model_type_of(family: str) -> str:
    """Return the `model_type` of a tiny model."""
    import transformers

    from tests.support.tiny_models import EVERY

    found: str = getattr(transformers, EVERY[family][0]).model_type
    return found


def described(families: Iterable[str]) -> dict[str, list[str]]:
    """Return the row of each kind of model without its last cell, and the tiny models of that kind."""
    from cotrain_workers.engine.model.families import MODEL_TYPES

    found: dict[str, list[str]] = {}
    first_with: dict[tuple[str, ...], str] = {}
    for family in families:
        kind = model_type_of(family)
        known = MODEL_TYPES[kind]
        first = first_with.setdefault(tuple(known.modules), kind)
        modules = ", ".join(known.modules) if first == kind else f"as `{first}`"
        modules = "those of its text model" if known.is_wrapper else modules
        found.setdefault(f"| {known.title} | `{kind}` | {modules} |", []).append(family)
    return found


def rows(page: str) -> dict[str, float]:
    """Return each row without its difference, and the difference."""
    return {row: float(difference) * 1e-6 for row, difference in ROW.findall(page)}


def with_families(page: str, measured: Mapping[str, Measured]) -> str:
    """Return the page with a table of the largest differences, by kind of model."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = ""
    for row, families in described(measured).items():
        largest = max(getattr(measured[each], name) for each in families for name in MEASURED)
        table += f"{row} {largest * 1e6:.1g} |\n"
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
