"""Folders of our programs."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / folder) for folder in ("client", "scheduler", "server", "workers")]
#: Folder of SDKs that are not installed, and of their libraries.
SDKS = ROOT / ".sdk"
COMMAND = Path(sys.executable).with_name("cotrain")
