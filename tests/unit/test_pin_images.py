"""`make pin-images` with a script in place of the registry: it writes the digests of the registry, or nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docker" / "pin-images.sh"
DIGESTS = {
    "python:3.11-slim": f"python@sha256:{'a' * 64}",
    "valkey/valkey:8.1": f"valkey/valkey@sha256:{'b' * 64}",
    "haproxy:3.2": f"haproxy@sha256:{'c' * 64}",
}


def pin(folder: Path, digests: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script of `make pin-images` with a `docker` that returns these digests."""
    cases = "".join(f"  *{tag}) echo '{digest}' ;;\n" for tag, digest in digests.items())
    engine = folder / "docker"
    engine.write_text(f'#!/bin/sh\n[ "$1" = pull ] && exit 0\ncase "$*" in\n{cases}esac\n')
    engine.chmod(0o755)
    return subprocess.run(
        [SCRIPT], cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
    )  # fmt: skip


def test_new_digests_replace_older_ones_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("COTRAIN_API_KEYS=tml-a b\nPYTHON_IMAGE=python@sha256:old\n")
    for _ in range(2):
        assert pin(tmp_path, DIGESTS).returncode == 0
    assert (tmp_path / ".env").read_text().splitlines() == [
        "COTRAIN_API_KEYS=tml-a b",
        f"PYTHON_IMAGE={DIGESTS['python:3.11-slim']}",
        f"REDIS_IMAGE={DIGESTS['valkey/valkey:8.1']}",
        f"HAPROXY_IMAGE={DIGESTS['haproxy:3.2']}",
    ]


def test_an_image_without_a_registry_pins_nothing(tmp_path: Path) -> None:
    told = pin(tmp_path, {"python:3.11-slim": DIGESTS["python:3.11-slim"]})
    assert told.returncode != 0
    assert "valkey/valkey:8.1 comes from no registry: it has no digest." in told.stderr
    assert not (tmp_path / ".env").exists()
