from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.warm.popen import run

ROOT = Path(__file__).resolve().parents[3]
#: None of this repository's packages is installed, and of its dependencies only those the benches declare.
BARE = f"""
import runpy, sys
import peft, transformers
from tests.warm.anew import forget
forget("cotrain", "bench", "tests")
absent = ("structlog", "redis", "pydantic", "pydantic_settings", "fastapi")
for name in [*sys.modules]:
    if name.split(".")[0] in absent:
        del sys.modules[name]
sys.modules.update(dict.fromkeys(absent))
sys.path[:] = [path for path in sys.path if "site-packages" in path or not path.startswith({str(ROOT)!r})]
sys.path.insert(0, {str(ROOT)!r})
for name in ("engine", "engine_check", "decode", "sampler_refresh", "trainer_sampler", "kernel_rates"):
    sys.argv = ["bench", name, "--help"]
    try:
        runpy.run_module("bench", run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0
"""


def test_the_engine_benches_run_without_our_packages_installed() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = run([sys.executable, "-c", BARE], cwd=ROOT, env=bare)

    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("--device") >= 5
