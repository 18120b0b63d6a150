"""Tokenizers that no hub has: the server serves them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from cotrain.wire.runs import TOKENIZER_FILES
from cotrain_store import redis_keys
from cotrain_store.messages.ids import encode
from tests.support.http_api import ALICE, POOL, Api, running_api
from tests.support.redis_server import EmbeddedRedis
from tests.support.talking import write_language

QUESTION = f"tokenizers?base_model={quote(POOL.base_model)}"


async def test_a_tokenizer_is_sent_as_its_worker_wrote_it(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        data_dir = api.services.settings.data_dir
        write_language(data_dir)
        folder = data_dir / "tokenizers" / POOL.tokenizer
        (folder / "code.py").write_text("no data")
        files = (await api.get(QUESTION)).json()["files"]
        written = {path.name: path.read_text() for path in folder.iterdir()}
        assert files == {name: written[name] for name in TOKENIZER_FILES if name in written}
        assert len(files) == 3
        plain = {"X-API-Key": ALICE, "Accept-Encoding": "identity"}
        raw = await api.http.get(f"/api/v1/{QUESTION}", headers=plain)
        assert "content-encoding" not in raw.headers
        assert json.loads(raw.content)["files"] == files


async def test_a_missing_tokenizer_is_reported(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        none = await api.get(QUESTION)
        assert none.status_code == 400
        assert none.json()["detail"].startswith("tiny/model has no tokenizer here")
        other = await api.get("tokenizers?base_model=other")
        assert (other.status_code, other.json()["code"]) == (400, "base_model_not_served")
        assert (await api.get("tokenizers")).status_code == 422
        assert (await api.get(QUESTION, key="tml-nobody")).status_code == 401


async def tokenizer_id(api: Api, base_model: str) -> str:
    """Rename the base model. Return the id from which SDKs load its tokenizer."""
    renamed = encode(replace(POOL, base_model=base_model))
    await api.services.connection.hset(redis_keys.pools(), POOL.id, renamed)
    session = (await api.post("create_session", {})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": base_model, "lora_config": {}}
    run = (await api.post("create_model", body)).json()["model_id"]
    info = (await api.post("get_info", {"model_id": run})).json()
    named: str = info["model_data"]["tokenizer_id"]
    return named


async def test_on_this_host_sdks_get_the_folder_of_a_tokenizer_without_a_hub(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        data_dir: Path = api.services.settings.data_dir
        assert await tokenizer_id(api, "mine") == "mine"  # no files were written
        write_language(data_dir)
        folder = str((data_dir / "tokenizers" / POOL.tokenizer).absolute())
        assert await tokenizer_id(api, "mine") == folder
        assert await tokenizer_id(api, "/models/mine") == folder
        assert await tokenizer_id(api, "org/mine") == "org/mine"
    async with running_api(empty_redis.url, "10.0.0.9") as api:
        write_language(api.services.settings.data_dir)
        assert await tokenizer_id(api, "mine") == "mine"
