"""Where our programs are."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / folder) for folder in ("client", "scheduler", "server", "workers")]
#: Where SDKs and their libraries are that are not installed.
SDKS = ROOT / ".sdk"
COMMAND = Path(sys.executable).with_name("cotrain")
