"""The Redis that all tests of a process share: settings of one test do not affect the next."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]
CARELESS = """
import redis

def test_leaves_no_memory(empty_redis):
    with redis.Redis.from_url(empty_redis.url) as connection:
        connection.config_set("maxmemory", 1)

def test_the_next_has_memory(empty_redis):
    with redis.Redis.from_url(empty_redis.url) as connection:
        connection.set("written", 1)
"""


def test_a_test_that_leaves_a_setting_fails_and_the_next_does_not(tmp_path: Path) -> None:
    careless = tmp_path / "test_careless.py"
    careless.write_text(CARELESS)
    options = ["-n", "0", "-p", "tests.conftest", f"--rootdir={ROOT}", str(careless)]
    command = [sys.executable, "-m", "pytest", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search("ERROR .*::test_leaves_no_memory", ran.stdout)
    assert "the Redis that all tests share: {'maxmemory': '1'}" in ran.stdout
    assert "2 passed, 1 error" in ran.stdout
