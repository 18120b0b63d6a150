"""Checkpoints with the cotrain client: saved, downloaded, uploaded, resumed."""

from __future__ import annotations

import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cotrain import (
    AdamParams,
    BadRequestError,
    Datum,
    LoraConfig,
    ModelInput,
    NotFoundError,
    RequestFailed,
    ServiceClient,
    TrainingClient,
)
from tests.conformance.running import KEYS, Server
from tests.support.proxies import LossyProxy
from tests.support.uploads import adapter, config, q_proj, tar

TOKENS = random.Random(0).choices(range(512), k=25)
DATUM = Datum(
    model_input=ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 24}
)
STEP = AdamParams(learning_rate=1e-2)


def logprobs(run: TrainingClient) -> list[float]:
    output = run.forward([DATUM], "cross_entropy").result()
    found: list[float] = output.loss_fn_outputs[0]["logprobs"].tolist()
    return found


def train(run: TrainingClient, steps: int = 2) -> list[float]:
    for _ in range(steps):
        run.forward_backward([DATUM], "cross_entropy")
        run.optim_step(STEP)
    return logprobs(run)


def test_a_run_resumes_from_a_checkpoint_bit_for_bit(service: ServiceClient, server: Server) -> None:
    run = service.create_lora_training_client(server.base_model, rank=4, seed=1)
    reached = train(run)
    path = run.save_state("middle", user_metadata={"step": "2"}).result().path
    end = train(run)

    again = service.create_training_client_from_state_with_optimizer(path)
    assert logprobs(again) == reached
    assert train(again) == end
    run.load_state_with_optimizer(path).result()
    assert train(run) == end
    run.load_state(path).result()
    assert logprobs(run) == reached
    assert train(run) != end  # AdamW started with new moments
    with pytest.raises(RequestFailed, match="already exists"):
        run.save_state("middle").result()
    assert run.save_state("middle", overwrite=True).result().path == path


def test_a_downloaded_checkpoint_can_be_uploaded_bit_for_bit(
    service: ServiceClient, server: Server, tmp_path: Path
) -> None:
    run = service.create_lora_training_client(server.base_model, rank=3, seed=2)
    reached = train(run)
    path = run.save_state("mine").result().path
    service.download_checkpoint(path, tmp_path)
    service.delete_checkpoint(path)
    with pytest.raises(NotFoundError):
        service.delete_checkpoint(path)

    brought = service.upload_checkpoint(tmp_path, server.base_model, "back")

    assert brought in {each.tinker_path for each in service.list_checkpoints()}
    fresh = service.create_training_client_from_state(brought)
    assert logprobs(fresh) == reached
    # The uploaded checkpoint has an optimizer without steps.
    also = service.create_training_client_from_state_with_optimizer(brought)
    end = train(fresh)
    assert end == train(also)

    # The same files, each sent by a link of its own.
    rest = service.create_rest_client()
    started = rest.external_weights_upload_start(server.base_model, LoraConfig(rank=3)).result()
    assert set(started.urls) == {path.name for path in tmp_path.iterdir()}
    for file, url in started.urls.items():
        httpx.put(url, content=(tmp_path / file).read_bytes()).raise_for_status()
    linked = rest.external_weights_upload_finish(started.upload_id).result().tinker_path
    assert rest.external_weights_upload_finish(started.upload_id).result().tinker_path == linked
    assert linked.endswith("/external_weights/uploaded")
    assert train(service.create_training_client_from_state(linked)) == end

    with pytest.raises(BadRequestError, match=r"base_model|not served"):
        rest.external_weights_upload_start("other/model", LoraConfig(rank=3)).result()
    started = rest.external_weights_upload_start(
        server.base_model, LoraConfig(rank=4, train_mlp=False, train_unembed=False)
    ).result()
    for file, content in adapter(**{"adapter_model.safetensors": q_proj(inputs=63)}).items():
        httpx.put(started.urls[file], content=content).raise_for_status()
    for _ in range(2):  # a repeat has the same answer
        with pytest.raises(BadRequestError, match=r"lora_A.weight has shape \[4, 63\]"):
            rest.external_weights_upload_finish(started.upload_id).result()


def test_a_peft_adapter_computes_the_same_here_as_in_peft(
    service: ServiceClient, server: Server, tmp_path: Path
) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(server.base_model)
    settings = peft.LoraConfig(
        r=6,
        lora_alpha=4,
        use_rslora=True,
        target_modules=["v_proj", "up_proj", "lm_head"],
        rank_pattern={r"layers\.\d\.(mlp|self_attn)\.u.*": 3},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = peft.get_peft_model(network, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        checkpoint = tmp_path / "checkpoint-100"
        model.save_pretrained(checkpoint)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]

    for name in ("tokenizer.json", "optimizer.pt", "training_args.bin", "chat_template.jinja"):
        (checkpoint / name).write_bytes(b"\x80\x04not read")
    archive = tmp_path / "checkpoint.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(checkpoint, checkpoint.name)

    with LossyProxy(server.address, {"training_runs/upload"}) as proxy, ServiceClient(proxy.address, KEYS[0]) as far:
        path = far.upload_checkpoint(archive, server.base_model, "foreign")
        assert proxy.lost == ["training_runs/upload"]
    run = service.create_training_client_from_state(path)

    assert np.abs(np.array(logprobs(run)) - expected.numpy()).max() < 8e-6
    assert sum(train(run)) > expected.sum()


def test_an_adapter_of_another_model_is_rejected_with_the_reason(
    service: ServiceClient, server: Server, tmp_path: Path
) -> None:
    archive = tmp_path / "other.tar"
    files = {"adapter_config.json": config(), "adapter_model.safetensors": q_proj(inputs=63)}
    archive.write_bytes(tar(files))
    with pytest.raises(RequestFailed, match=r"lora_A.weight has shape \[4, 63\]"):
        service.upload_checkpoint(archive, server.base_model, "other")
    archive.write_bytes(tar({**files, "../evil.sh": b"rm"}))
    with pytest.raises(BadRequestError, match=r"forbidden member: \.\./evil\.sh"):
        service.upload_checkpoint(archive, server.base_model, "other")
