"""Settings that are none any more: a process that is given one says at its start what to do instead."""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING

from cotrain_store.settings.store import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONSTANT = "unset it, the server decides now"

_QUOTAS = (
    *("ops", "tokens", "bytes", "runs", "unread_bytes", "record_bytes", "sessions", "samplers"),
    *("sampler_bytes", "polls", "samples", "checkpoints", "checkpoint_bytes"),
)

#: What to do instead, by the name without its prefix. An old value must not be ignored in silence.
REPLACED_BY: Mapping[str, str] = MappingProxyType(
    {
        "BATCH_POLLING": _CONSTANT,
        "CHUNK_BYTES": "lower COTRAIN_MAX_BODY_BYTES: a chunk is half of it at most",
        "CHUNK_DATUMS": _CONSTANT,
        "COMPRESS_REQUESTS": _CONSTANT,
        "EVICT_IDLE_S": _CONSTANT,
        "FUSION": _CONSTANT,
        "GATHER_MS": _CONSTANT,
        "LISTEN_FD": "start `python -m cotrain_server --listen-fd FD`",
        "LONG_POLL_S": _CONSTANT,
        "LORA_BACKEND": _CONSTANT,
        "OWED_MEMORY_BYTES": _CONSTANT,
        **{f"QUOTA_{name.upper()}": f"write {name}=NUMBER into COTRAIN_QUOTAS" for name in _QUOTAS},
        "QUANTUM_TOKENS": _CONSTANT,
        "RECOMPUTE": _CONSTANT,
        "SNAPSHOT_DEBT_BYTES": "set COTRAIN_REPLAY_BACKLOG_S",
        "SNAPSHOT_DEBT_OPS": "set COTRAIN_REPLAY_BACKLOG_S",
        "SNAPSHOT_DEBT_S": "set COTRAIN_REPLAY_BACKLOG_S",
        "SNAPSHOT_IDLE_S": _CONSTANT,
        "WEIGHTS_MEMORY_BYTES": _CONSTANT,
    }
)


def removed_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Say of each removed setting that is set what to do instead, one sentence each."""
    present = os.environ if environ is None else environ
    return [
        f"{PREFIX}{name} is no setting any more: {instead}."
        for name, instead in sorted(REPLACED_BY.items())
        if f"{PREFIX}{name}" in present
    ]
