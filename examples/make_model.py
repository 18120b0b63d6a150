"""Make the demo's base model in a folder, to serve it: `python examples/make_model.py [FOLDER]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from opening import FOLDER, KEY, demo_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = demo_model(parser.parse_args().folder)
    print(f"cotrain serve --base-model {folder} --api-key {KEY}")
    print(f"export COTRAIN_BASE_URL=http://127.0.0.1:8000 COTRAIN_API_KEY={KEY}")
