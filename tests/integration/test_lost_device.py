"""A worker whose device is lost ends at once, with a status of its own; whoever started it starts it again."""

from __future__ import annotations

import sys
from pathlib import Path

from cotrain_workers.engine.device import EXIT_CODE
from tests.support.processes import PATIENCE_S, environment_of, settings_of
from tests.support.redis_server import EmbeddedRedis
from tests.warm.popen import run

#: The real process, but for its model, and with a loop that meets a sticky error of the device.
WORKER = """
import atexit
from unittest.mock import Mock
import cotrain_workers.__main__ as worker
from cotrain_workers.worker import bootstrap
from cotrain_workers.engine.device import DeviceLost

atexit.register(print, "an orderly end")
lost = Mock(run=Mock(side_effect=DeviceLost("CUDA error: device-side assert triggered")))
bootstrap.Engine = Mock()
bootstrap.measure_throughput = lambda *_: 1.0
worker.publish_tokenizer = lambda *_, **__: None
worker.pool_record = Mock()
worker.enter_pool = lambda *_: lost
worker.main()
"""


def test_a_lost_device_ends_the_process_with_its_own_status(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    settings = settings_of(empty_redis.url, tmp_path, tmp_path / "no-model")
    ended = run([sys.executable, "-c", WORKER], env=environment_of(settings), timeout=PATIENCE_S)
    said = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_CODE == 70, said
    assert "device_lost" in said
    assert "device-side assert" in said
    assert "an orderly end" not in said
    assert "Traceback" not in said
