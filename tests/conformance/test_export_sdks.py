"""Exports through the official SDKs, unmodified."""

from __future__ import annotations

import tarfile
import time
import warnings
from pathlib import Path
from typing import Any

import pyrage
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.conformance.running import CheckpointReport, Server

LENGTHS, VOCAB = (5, 9, 13, 8), 512
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}
EXACT = 1e-5
"""Tolerance of an export's log-probs in plain PEFT against the server's own, in fp32."""


def test_an_export_is_the_same_model_in_plain_peft(checkpointed: CheckpointReport, server: Server) -> None:
    if checkpointed.sdk == "0.22.0":
        return  # this SDK cannot export
    facts = checkpointed.facts["exported"]
    folder = checkpointed.folder / "plain"
    assert set(facts["files"]["plain"]) == PEFT_FILES
    for name, length in facts["files"]["plain"].items():
        assert (folder / name).stat().st_size == length
    assert _peft_logprobs(server.base_model, folder) == pytest.approx(_flat(facts["logprobs"]), abs=EXACT, rel=0)
    listed = facts["listed"]["external_weights/plain"]
    assert (listed["type"], listed["path"]) == ("external", facts["paths"]["plain"])


def test_an_age_encrypted_export_is_readable_by_each_recipient(checkpointed: CheckpointReport) -> None:
    if checkpointed.sdk == "0.22.0":
        return  # this SDK cannot export
    facts = checkpointed.facts["exported"]
    assert set(facts["files"]["locked"]) == {f"{name}.age" for name in PEFT_FILES}
    for name in PEFT_FILES:
        plain = (checkpointed.folder / "plain" / name).read_bytes()
        locked = (checkpointed.folder / "locked" / f"{name}.age").read_bytes()
        for written in facts["identities"]:
            identity = pyrage.x25519.Identity.from_str(written)
            assert pyrage.decrypt(locked, [identity]) == plain
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(locked, [pyrage.x25519.Identity.generate()])
    assert facts["recipient"]["error"] == "RequestFailedError"
    assert "age_encryption_recipients" in facts["recipient"]["message"]


def test_a_signed_link_opens_and_a_forged_one_does_not(checkpointed: CheckpointReport) -> None:
    if checkpointed.sdk != "0.22.0":
        assert checkpointed.facts["exported"]["statuses"] == [200, 403]


def test_an_archive_is_a_peft_folder(checkpointed: CheckpointReport, server: Server) -> None:
    if checkpointed.sdk != "0.22.0":
        return  # this SDK downloads files one by one
    facts, folder = checkpointed.facts["archived"], checkpointed.folder / "archive"
    archive = checkpointed.folder / "archive.tar"
    assert archive.stat().st_size == facts["length"]
    assert facts["expires"] > time.time()
    with tarfile.open(archive) as tar:
        assert all(member.isreg() for member in tar.getmembers())
        assert set(tar.getnames()) == PEFT_FILES | {"checkpoint_complete"}
        tar.extractall(folder, filter="data")
    assert _peft_logprobs(server.base_model, folder) == pytest.approx(_flat(facts["logprobs"]), abs=EXACT, rel=0)


def _flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _peft_logprobs(base_model: str, folder: Path) -> list[float]:
    """Score the scenarios' batch with plain PEFT on the plain base model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of PEFT about its use of transformers
        base = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder).eval()
    values: list[float] = []
    for length in LENGTHS:
        tokens = _tokens(length)
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1]).logits[0].float()
        rows: Any = logits.log_softmax(-1).gather(1, tokens[1:, None])
        values += rows[:, 0].tolist()
    return values


def _tokens(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length + 1,), generator=generator)
