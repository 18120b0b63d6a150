"""Checkpoints under the official SDKs, unmodified: restored, named, kept, deleted, published and exported."""

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

from tests.conformance.running import CheckpointReport, Facts, Server
from tests.support.proxies import LossyProxy

# Constants of the scenarios, which run under another SDK and are not imported here.
TTL_S, LENGTHS, VOCAB = 7200, (5, 9, 13, 8), 512
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors"}
EXACT = 1e-5
"""Tolerance of an export's log-probs in plain PEFT against the server's own, in fp32."""

# ---- Restoring -----------------------------------------------------------------------------------


def test_loading_restores_every_bit_of_the_weights(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["restored"]
    assert facts["astray"] != facts["halfway"]
    assert facts["halfway"] == facts["loaded"] == facts["loaded_fresh"]
    assert facts["halfway"] == facts["created"] == facts["created_fresh"]
    assert facts["rank"] == 4


def test_a_run_restored_with_its_optimizer_continues_unchanged(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["restored"]
    assert facts["end"] == facts["loaded_end"] == facts["created_end"]


def test_a_run_restored_without_its_optimizer_starts_a_new_one(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["restored"]
    assert facts["loaded_fresh_end"] == facts["created_fresh_end"]
    assert facts["loaded_fresh_end"] != facts["end"]


def test_a_run_from_a_checkpoint_is_a_separate_run(checkpointed: CheckpointReport) -> None:
    assert len(set(checkpointed.facts["restored"]["runs"])) == 3


def test_a_load_discards_the_gradient_before_it(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["discarded"]
    assert facts["clean"] == facts["loaded"] == 0.0


def test_all_apis_sample_the_same_from_the_same_weights(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["sampled"]
    assert facts["now"] == facts["training"] == facts["sampler"]
    assert facts["now"] != facts["base"]


# ---- Names and lifetimes -------------------------------------------------------------------------


def test_a_saved_checkpoint_has_its_path_and_is_listed(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["named"]
    assert facts["path"] == f"tinker://{facts['run']}/weights/name"
    first = facts["first"]["weights/name"]
    assert (first["type"], first["path"], first["public"]) == ("training", facts["path"], False)
    assert first["size"] > 0
    assert first["lives_s"] is None


def test_a_taken_name_is_rejected_and_nothing_is_lost(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["named"]
    assert facts["collision"]["error"] == "RequestFailedError"
    assert "already exists" in facts["collision"]["message"]
    assert "overwrite" in facts["collision"]["message"]
    assert facts["unmoved"] == facts["before"] != facts["after"]


def test_overwriting_replaces_weights_and_metadata(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["named"]
    assert facts["moved_path"] == facts["path"]
    assert facts["moved"] == facts["after"]
    assert list(facts["listed"]) == ["weights/name"]
    if checkpointed.sdk != "0.22.0":  # SDK 0.22.0 can neither write nor read them
        assert facts["first"]["weights/name"]["user_metadata"] == {"kept": "no", "a": "1"}
        assert facts["listed"]["weights/name"]["user_metadata"] == {"b": "2"}


@pytest.mark.parametrize("name", ["a/b", "..", "", "x" * 200])
def test_an_invalid_name_is_rejected_and_the_run_continues(checkpointed: CheckpointReport, name: str) -> None:
    facts = checkpointed.facts["named"]
    assert facts["wrong"][name]["error"] in ("RequestFailedError", "BadRequestError"), facts
    assert facts["next"].endswith("/weights/next")


def test_a_checkpoint_expires_after_its_ttl(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["kept"]
    assert list(facts["saved"]) == ["sampler_weights/for-a-while", "weights/for-a-while"]
    for each in facts["saved"].values():
        assert each["lives_s"] == pytest.approx(TTL_S, abs=60)
    assert facts["longer"] == pytest.approx(2 * TTL_S, abs=60)
    assert facts["for_ever"] is None


def test_a_ttl_below_an_hour_is_rejected(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["kept"]
    assert facts["too_short"]["error"] == "RequestFailedError"
    assert "3600" in facts["too_short"]["message"]
    assert facts["set_too_short"]["error"] in ("BadRequestError", "UnprocessableEntityError")
    assert "3600" in facts["set_too_short"]["message"]


# ---- Descriptions --------------------------------------------------------------------------------


def test_a_run_and_its_checkpoints_are_described(checkpointed: CheckpointReport, server: Server) -> None:
    facts = checkpointed.facts["deleted"]
    assert facts["about"] == {
        "id": facts["run"],
        "base_model": server.base_model,
        "rank": 3,
        "corrupted": False,
        "user_metadata": {"renderer": "plain"},
        "last": "weights/one",
        "last_sampler": "sampler_weights/two",
    }
    assert facts["weights"] == {
        "base_model": server.base_model,
        "is_lora": True,
        "lora_rank": 3,
        "train_attn": True,
        "train_mlp": False,
    }
    paths = {each["path"] for each in facts["before"].values()}
    assert len(paths) == 2
    assert paths <= set(facts["of_tenant"])


def test_a_deleted_checkpoint_is_missing_and_its_name_is_free(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["deleted"]
    assert list(facts["after"]) == ["sampler_weights/two"]
    assert facts["none"] == {}
    assert facts["load"]["error"] == "RequestFailedError"
    assert facts["create"]["error"] == "NotFoundError"
    assert facts["delete"]["error"] == "NotFoundError"
    assert facts["sample"]["error"] == "NotFoundError"
    assert facts["saved_again"].endswith("/weights/one")


# ---- Owners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["private", "again_private"])
def test_a_foreign_checkpoint_is_not_found(checkpointed: CheckpointReport, when: str) -> None:
    published = checkpointed.facts["published"]
    assert published[f"{when}_list"]["error"] == "NotFoundError"
    facts = published[when]
    assert facts["load"]["error"] == "RequestFailedError"
    for what in ("create", "weights_info", "sample"):
        assert facts[what]["error"] == "NotFoundError", what


def test_other_tenants_can_read_a_published_checkpoint(checkpointed: CheckpointReport) -> None:
    facts = checkpointed.facts["published"]
    assert (facts["is_public"], facts["is_private"]) == (True, False)
    assert facts["theirs"] == [facts["mine"]] * 2
    assert all(each["error"] is None for each in facts["public"].values()), facts["public"]
    assert facts["public_list"] == ["weights/shared"]


@pytest.mark.parametrize("when", ["private_writes", "public_writes"])
def test_a_foreign_checkpoint_cannot_be_modified(checkpointed: CheckpointReport, when: str) -> None:
    for what, outcome in checkpointed.facts["published"][when].items():
        assert outcome["error"] == "NotFoundError", what


def test_a_copy_remains_when_its_original_is_deleted(checkpointed: CheckpointReport) -> None:
    if checkpointed.sdk == "0.22.0":
        return  # this SDK cannot copy
    facts = checkpointed.facts["copied"]
    assert len({facts["path"], *facts["copies"]}) == 3
    assert facts["loaded"] == [facts["original"]] * 2
    assert facts["listed"] == facts["copies"][:1]
    assert facts["foreign"]["error"] == "NotFoundError"


# ---- Faults --------------------------------------------------------------------------------------


def test_a_dropped_answer_changes_no_bit(
    checkpointed: CheckpointReport, checkpointed_from_afar: tuple[LossyProxy, Facts]
) -> None:
    proxy, facts = checkpointed_from_afar
    asked = {"load_weights", "publish", "save_weights", "save_weights_for_sampler"}
    if checkpointed.sdk == "0.22.0":
        asked |= {"weights_info"}
    else:
        asked |= {"copy_weights", "save_weights_external"}
    assert asked == {endpoint.rpartition("/")[2] for endpoint in proxy.lost}
    assert facts["undisturbed"] == checkpointed.facts["undisturbed"]
    assert facts["undisturbed"]["new"] == facts["undisturbed"]["paths"]


# ---- Exports -------------------------------------------------------------------------------------


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
