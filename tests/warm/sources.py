"""Where our programs are."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / folder) for folder in ("client", "scheduler", "server", "workers")]
COMMAND = Path(sys.executable).with_name("cotrain")
