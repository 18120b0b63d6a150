"""Make the demo's base model in a folder, to serve it: `python examples/make_model.py [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from opening import FOLDER, KEY, demo_model

if __name__ == "__main__":
    folder = demo_model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    print(f"cotrain serve --base-model {folder} --api-key {KEY}")
    print(f"export COTRAIN_BASE_URL=http://127.0.0.1:8000 COTRAIN_API_KEY={KEY}")
