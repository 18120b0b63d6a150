from __future__ import annotations

import inspect
import re
from pathlib import Path

from cotrain_store import connection, keys
from cotrain_store.messages import PoolId, RunId

SCRIPTS = Path(connection.__file__).parent / "scripts"


def test_all_keys_of_a_pool_share_its_hash_tag() -> None:
    makers = [
        maker
        for _, maker in inspect.getmembers(keys, inspect.isfunction)
        if "pool" in inspect.signature(maker).parameters and maker is not keys.of_close
    ]
    assert len(makers) > 10
    for maker in makers:
        places = inspect.signature(maker).parameters
        assert maker(*(PoolId("p") if name == "pool" else "x" for name in places)).startswith(
            "cotrain:{p}:"
        )


def test_the_scripts_build_only_keys_that_are_made_here() -> None:
    pool, run = PoolId("p"), RunId("r")
    known = {
        name.removeprefix(keys.prefix(pool))
        for name in (
            keys.log(pool, RunId("")),
            keys.ops(pool, RunId("")),
            keys.bodies(pool, RunId("")),
            keys.queue(pool, ""),  # type: ignore[arg-type]
            keys.drops(pool, ""),  # type: ignore[arg-type]
            keys.notify_worker(pool, ""),  # type: ignore[arg-type]
        )
    }
    built = set()
    for script in SCRIPTS.glob("*.lua"):
        text = script.read_text()
        built |= set(re.findall(r"prefix \.\. '([a-z:]+)'", text))
        assert set(re.findall(r"'(cotrain:[a-z:]*)'", text)) <= {"cotrain:result:"}
    assert built <= known
    assert keys.result(f"{run}:1") == "cotrain:result:r:1"  # type: ignore[arg-type]


def test_no_script_negates_a_number_the_way_redis_does_not_read() -> None:
    for script in SCRIPTS.glob("*.lua"):
        assert not re.search(r", -tonumber", script.read_text()), script.name
