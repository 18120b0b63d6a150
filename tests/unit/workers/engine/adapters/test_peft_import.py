"""Adapters saved by PEFT, read as uploads and imported into the engine, with equal results."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from cotrain_server.adapter_upload.peft_config import FAMILY_BY_MODULE
from cotrain_server.adapter_upload.peft_tensors import read_adapter
from cotrain_server.errors import Invalid
from cotrain_store.blobs.folder import Folder
from cotrain_store.bodies.adapter_bodies import PeftAdapter as Upload
from cotrain_store.bodies.adapter_bodies import encode_import
from cotrain_workers.checkpoints.peft_folder import CONFIG, TENSORS, key_of, write_folder
from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.adapters.peft_import import TINKER, ImportRefused, read_import
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model import families
from cotrain_workers.engine.model.families import LLAMA
from cotrain_workers.engine.ops import CreateOutput, Datum, Failure, HostWeights, Import, Pass, PassOutput, PeftAdapter
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.op_codec import peft_adapter
from tests.support.draws import variant
from tests.support.mixtures import SOME, random_weights
from tests.support.shared_base import load_plain
from tests.support.training import ModelFolder, NewEngine, random_datum
from tests.support.uploads import config, q_proj, safetensors

TOKENS = np.random.default_rng(0).integers(0, 128, 24)
MAX_RANK = 16
ATTENTION, MLP = ([name for name, each in LLAMA.items() if each == family] for family in ("attn", "mlp"))
EVERYTHING = (*ATTENTION, *MLP, "lm_head")
EXPERTS = "model.layers.1.mlp.experts"

FOREIGN: dict[str, dict[str, Any]] = {
    "one module": {"r": 3, "lora_alpha": 5, "target_modules": ["v_proj"]},
    "everything": {"r": 8, "lora_alpha": 16, "target_modules": list(EVERYTHING)},
    "our scale": {"r": 4, "lora_alpha": 32, "target_modules": list(ATTENTION)},
    "rank-stabilised": {
        "r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": list(MLP)
    },
    "ranks and alphas by module": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"],
        "rank_pattern": {"q_proj": 7, "^model.layers.1.mlp.down_proj": 5},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "lm_head": 9},
    },
    "one layer": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "layers_to_transform": [1]
    },
    "all linear modules": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "by pattern": {
        "r": 4, "lora_alpha": 8, "target_modules": r".*\.self_attn\.[qo]_proj"
    },
    "ranks and alphas by pattern": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.up)_proj",
        "rank_pattern": {r"layers\.[1-9]\.self_attn\.(q|k)_proj": 7, r".*mlp.*": 3},
        "alpha_pattern": {r"[a-p]_proj": 5, r"layers\.0\..*": 9},
    },
    "tied without a tied target": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "ensure_weight_tying": True
    },
}  # fmt: skip


#: Settings that are part of other rows.
PART_OF_OTHERS = ("one module", "our scale", "by pattern")


@pytest.fixture
def foreign(model_folder: ModelFolder, tmp_path: Path) -> Callable[..., Path]:
    """Return a function with which PEFT itself saves an adapter with random B."""

    def saved(
        settings: dict[str, Any],
        *,
        tied: bool,
        dtype: torch.dtype = torch.float32,
        save_embedding_layers: bool | str = False,
    ) -> Path:
        network: Any = AutoModelForCausalLM.from_pretrained(model_folder("qwen3", tied=tied))
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied embeddings
            model: Any = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **settings))
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = torch.randn_like(parameter).mul_(0.05).to(dtype)
            model.save_pretrained(tmp_path, save_embedding_layers=save_embedding_layers)
        return tmp_path

    return saved


def imported(upload: Upload) -> PeftAdapter:
    """Return an upload encoded to the body of its op and decoded again."""
    return peft_adapter(encode_import(upload))


def read(folder: Path) -> Upload:
    return read_adapter((folder / CONFIG).read_bytes(), (folder / TENSORS).read_bytes(), seed=3)


def every_logprob(network: Any) -> np.ndarray:
    with torch.no_grad():
        logits = network(input_ids=torch.from_numpy(TOKENS)[None]).logits[0]
    return torch.log_softmax(logits.float(), -1).numpy()  # [tokens, vocabulary]


def every_logprob_of(engine: Engine, run: str) -> np.ndarray:
    """Return the log-probs of every token of the vocabulary at every position: the logits up to a constant."""
    columns = np.tile(np.arange(128), (len(TOKENS), 1))
    weights = np.zeros(columns.shape, np.float32)
    datum = Datum(TOKENS, {"target_tokens": columns, "weights": weights})
    forward = Pass(run, 1, [datum], "cross_entropy", {}, needs_grad=False)
    output = engine.run([forward]).outputs[run, 1]
    assert isinstance(output, PassOutput)
    return output.logprobs[0]


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        *((each, False) for name, each in FOREIGN.items() if name not in PART_OF_OTHERS),
        (FOREIGN["everything"], True),
        *(variant(FOREIGN[name], False) for name in PART_OF_OTHERS),
        *(variant(each, True) for name, each in FOREIGN.items() if name != "everything"),
    ],
)
def test_an_imported_adapter_computes_the_results_of_peft(
    new_engine: NewEngine, model_folder: ModelFolder, foreign: Callable[..., Path], settings: dict[str, Any], tied: bool
) -> None:
    folder, engine = foreign(settings, tied=tied), new_engine(tied=tied)
    network: Any = AutoModelForCausalLM.from_pretrained(model_folder("qwen3", tied=tied))
    alone = every_logprob(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = PeftModel.from_pretrained(network, folder)
    expected = every_logprob(plain)

    output = engine.run([Import("r", 0, imported(read(folder)))]).outputs["r", 0]

    assert isinstance(output, CreateOutput)
    assert np.abs(expected - alone).max() > 0.01
    assert np.abs(every_logprob_of(engine, "r") - expected).max() < 8e-6


@pytest.mark.parametrize(
    ("tied", "along"), [(False, "auto"), (True, True), variant(False, True), variant(True, "auto")]
)
def test_saved_base_weights_equal_to_ours_are_dropped(
    new_engine: NewEngine, foreign: Callable[..., Path], tied: bool, along: bool | str
) -> None:
    settings = FOREIGN["ranks and alphas by module"]
    folder, engine = foreign(settings, tied=tied), new_engine(tied=tied)
    plain = engine.run([Import("plain", 0, imported(read(folder)))]).outputs["plain", 0]
    foreign(settings, tied=tied, save_embedding_layers=along)
    tensors = load_file(folder / TENSORS)
    assert "base_model.model.lm_head.base_layer.weight" in tensors
    assert engine.run([Import("r", 0, imported(read(folder)))]).outputs["r", 0] == plain
    assert np.array_equal(every_logprob_of(engine, "r"), every_logprob_of(engine, "plain"))
    for name in (name for name in tensors if "lora_" not in name):
        for other in (tensors[name] + 1, tensors[name][:-1].clone()):
            changed = replace(read(folder), tensors=save({**tensors, name: other}))
            refusal = engine.run([Import("x", 0, imported(changed))]).outputs["x", 0]
            assert isinstance(refusal, Failure)
            assert refusal.message.startswith(f"{name} cannot be imported: these are weights")
        halved = replace(read(folder), tensors=save({**tensors, name: tensors[name].bfloat16()}))
        run = f"half {name}"
        assert engine.run([Import(run, 0, imported(halved))]).outputs[run, 0] == plain


def test_double_precision_is_rounded_as_by_peft(new_engine: NewEngine, foreign: Callable[..., Path]) -> None:
    folder = foreign(FOREIGN["our scale"], tied=False, dtype=torch.float64)
    stored = load_file(folder / TENSORS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float64}
    layout_of = new_engine().adapters.layout_of
    weights = read_import(imported(read(folder)), layout_of, MAX_RANK)
    pair = layout_of(weights.spec).views(weights.flat)["model.layers.0.self_attn.q_proj"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(pair.a, stored[name].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_without_loss(
    new_engine: NewEngine, foreign: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = foreign(FOREIGN["our scale"], tied=False, dtype=dtype)
    stored = load_file(folder / TENSORS)
    assert {tensor.dtype for tensor in stored.values()} == {dtype}
    layout_of = new_engine().adapters.layout_of
    weights = read_import(imported(read(folder)), layout_of, MAX_RANK)
    for module, pair in layout_of(weights.spec).views(weights.flat).items():
        for letter, matrix in zip("AB", pair, strict=True):
            ours = stored[f"base_model.model.{module}.lora_{letter}.weight"].float()
            assert torch.equal(matrix, ours)


@pytest.mark.parametrize(
    "spec",
    [AdapterSpec(4, seed=3), AdapterSpec(3, 3, train_mlp=False), AdapterSpec(6, 3, train_attn=False)],
    ids=["everything", "no-mlp", "no-attn"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_our_own_export_is_imported_unchanged(
    new_engine: NewEngine, tmp_path: Path, spec: AdapterSpec, tied: bool
) -> None:
    layout_of = new_engine(tied=tied).adapters.layout_of
    flat = torch.zeros(layout_of(spec).size)
    for pair in layout_of(spec).views(flat).values():
        for matrix in pair:
            matrix.copy_(torch.randn(matrix.shape))
    folder = write_folder(Folder(tmp_path), HostWeights(spec, flat), layout_of(spec), "base")
    weights = read_import(imported(read(tmp_path / folder.key)), layout_of, MAX_RANK)
    assert weights.spec == spec
    assert weights.flat.numpy().tobytes() == flat.numpy().tobytes()


def test_missing_modules_of_an_adapter_start_as_in_a_fresh_one(
    new_engine: NewEngine, foreign: Callable[..., Path]
) -> None:
    layout_of = new_engine().adapters.layout_of
    adapter = read(foreign(FOREIGN["ranks and alphas by module"], tied=False))
    weights = read_import(imported(adapter), layout_of, MAX_RANK)
    layout = layout_of(weights.spec)
    fresh = layout.views(initial_weights(weights.spec, layout))
    views = layout.views(weights.flat)
    assert weights.spec == AdapterSpec(7, seed=3)
    given, left_out = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj"
    assert torch.equal(views[left_out].a, fresh[left_out].a)
    assert not views[left_out].b.any()
    assert not torch.equal(views[given].a[:2], fresh[given].a[:2])
    assert torch.equal(views[given].a[2:], fresh[given].a[2:])
    assert not views[given].b[:, 2:].any()


def adapter_of_q_proj(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Upload:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = safetensors({f"{module}.lora_A.weight": shape_a, f"{module}.lora_B.weight": shape_b})
    return read_adapter(config(), tensors, 0)


def with_content(adapter: Upload, a: torch.Tensor) -> Upload:
    module = adapter.modules[0]
    return replace(adapter, tensors=save({module.a: a, module.b: torch.ones(128, 4)}))


GOOD = read_adapter(config(), q_proj(inputs=64, outputs=128), 0)
FAR = replace(GOOD.modules[0], name="model.layers.9.self_attn.q_proj")
REFUSED: dict[str, tuple[PeftAdapter, str]] = {
    "other width": (imported(adapter_of_q_proj((4, 63), (128, 4))), r"needs \[4, 64\]"),
    "other height": (imported(adapter_of_q_proj((4, 64), (127, 4))), r"needs \[128, 4\]"),
    "no such layer": (imported(replace(GOOD, modules=(FAR,))), "model.layers.9"),
    "rank over the limit": (imported(replace(GOOD, lora=replace(GOOD.lora, rank=17))), "rank 17; between 1 and 16"),
    "rank over the run's": (imported(replace(GOOD, lora=replace(GOOD.lora, rank=2))), "no rank of 1 to 2"),
    "left-over tensors": (imported(replace(GOOD, modules=())), "lora_A.weight: not a LoRA"),
    "missing tensor": (imported(replace(GOOD, modules=(replace(GOOD.modules[0], a="x"),))), "x is missing"),
    "not a number": (imported(with_content(GOOD, torch.full((4, 64), torch.nan))), "finite"),
    "endless": (imported(with_content(GOOD, torch.full((4, 64), -torch.inf))), "finite"),
    "too large once scaled": (
        imported(replace(with_content(GOOD, torch.ones(4, 64)), modules=(replace(GOOD.modules[0], scale=1e40),))),
        "lora_B.weight holds numbers",
    ),
    "integers": (imported(with_content(GOOD, torch.ones(4, 64, dtype=torch.int32))), "F32, F16 and BF16"),
    "no safetensors": (imported(replace(GOOD, tensors=b"PK")), "cannot be read"),
}


@pytest.mark.parametrize(("adapter", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_does_not_fit_the_base_model_is_refused_by_its_key(
    new_engine: NewEngine, adapter: PeftAdapter, reason: str
) -> None:
    with pytest.raises(ImportRefused, match=reason):
        read_import(adapter, new_engine().adapters.layout_of, MAX_RANK)


def test_a_refusal_fails_only_its_import(new_engine: NewEngine) -> None:
    engine = new_engine()
    bad = Import("bad", 0, REFUSED["other width"][0])
    outputs = engine.run([bad, Import("good", 0, imported(GOOD))]).outputs
    refusal = outputs["bad", 0]
    assert isinstance(refusal, Failure)
    assert refusal.category == "user"
    assert isinstance(outputs["good", 0], CreateOutput)


def test_uploads_are_read_for_the_adaptable_modules() -> None:
    assert dict(FAMILY_BY_MODULE) == dict(families.FAMILY_BY_MODULE)


def read_upload(engine: Engine, config: bytes, tensors: bytes) -> HostWeights:
    """Return an upload as the worker reads it."""
    adapter = imported(read_adapter(config, tensors, seed=3))
    return read_import(adapter, engine.adapters.layout_of, MAX_RANK, {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        *((family, ("gate_up_proj", "down_proj")) for family in SOME),
        (SOME[0], ("down_proj",)),
        *(variant(family, ("down_proj",)) for family in SOME[1:]),
    ],
)
def test_an_adapter_of_peft_gives_its_values(
    new_engine: NewEngine, model_folder: ModelFolder, tmp_path: Path, family: str, parameters: tuple[str, ...]
) -> None:
    network: Any = load_plain(model_folder(family), torch.float32)
    network.set_experts_implementation("eager")
    config = LoraConfig(
        r=5,
        lora_alpha=9,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{each}" for each in parameters],
        rank_pattern={"experts.down_proj": 4},
    )
    torch.manual_seed(0)
    model = get_peft_model(network, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) / 20
    model.save_pretrained(tmp_path)

    engine = new_engine(family)
    settings, tensors = ((tmp_path / name).read_bytes() for name in (CONFIG, TENSORS))
    upload = peft_adapter(encode_import(read_adapter(settings, tensors, seed=3)))
    assert upload.spec.per_expert
    datum = random_datum(np.random.default_rng(0), "cross_entropy", 40)
    forward = Pass("run", 1, [datum], "cross_entropy", {}, needs_grad=False)
    ours = engine.run([Import("run", 0, upload), forward]).outputs["run", 1]

    assert isinstance(ours, PassOutput), ours
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])[:, None]
    theirs = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()
    assert np.abs(theirs - ours.logprobs[0]).max() < 1e-5


def exported(engine: Engine, spec: AdapterSpec, root: Path) -> tuple[HostWeights, bytes, Path]:
    """Return random weights, and the configuration and the folder of their export."""
    weights = random_weights(engine, "run", spec)
    layout = engine.adapters.layout_of(spec)
    folder = root / key_of(write_folder(Folder(root), weights, layout, "base").digest)
    return weights, (folder / CONFIG).read_bytes(), folder


def same(found: HostWeights, weights: HostWeights) -> bool:
    """Return True if two adapters have equal matrices, whatever their seeds and alphas."""
    return found.spec.per_expert == weights.spec.per_expert and torch.equal(found.flat, weights.flat)


@pytest.mark.parametrize("per_expert", [False, True])
def test_an_export_comes_back_to_the_bit(new_engine: NewEngine, tmp_path: Path, per_expert: bool) -> None:
    engine = new_engine("qwen2_moe")
    spec = AdapterSpec(5, seed=1, per_expert=per_expert)
    weights, config, folder = exported(engine, spec, tmp_path)
    assert same(read_upload(engine, config, (folder / TENSORS).read_bytes()), weights)

    # Without the note, the copies are matrices of their own, and gate and up have the rank of both.
    tensors = load_file(folder / TENSORS)
    found = read_upload(engine, config, save(tensors))
    assert (found.spec.rank, found.spec.per_expert) == (10, True)

    name = f"base_model.model.{EXPERTS}.base_layer.lora_B.weight"
    tensors[name][0, -1] = 1.0  # of gate, in a rank of up
    with pytest.raises(ImportRefused, match="gate and up have no ranks of their own"):
        read_upload(engine, config, save(tensors, {"experts": "shared_outer"}))


def renamed(
    engine: Engine, weights: HostWeights, tensors: Mapping[str, torch.Tensor], form: str
) -> dict[str, torch.Tensor]:
    """Return an export with the names and shapes of another form."""
    plain = {name: each for name, each in tensors.items() if ".experts." not in name}
    layout = engine.adapters.layout_of(weights.spec)
    views = layout.views(weights.flat)
    at_tinker = {product: name for name, product in TINKER.items()}
    for module in layout.gate_by_experts:
        for product, name in at_tinker.items():
            for letter, matrices in zip("AB", views[f"{module}.{product}"], strict=True):
                if form == "tinker":
                    key = f"base_model.model.{module}.{name}.lora_{letter}.weight"
                    plain[key] = matrices.contiguous()
                    continue
                for at, each in enumerate(matrices):
                    key = f"base_model.model.{module}.{at}.{product}.lora_{letter}.weight"
                    plain[key] = each.contiguous()
    return plain


@pytest.mark.parametrize(("form", "per_expert"), [("tinker", False), ("tinker", True), ("index", True)])
def test_other_names_of_experts_are_read(new_engine: NewEngine, tmp_path: Path, form: str, per_expert: bool) -> None:
    engine = new_engine("qwen3_moe")
    spec = AdapterSpec(4, seed=1, per_expert=per_expert)
    weights, config, folder = exported(engine, spec, tmp_path)
    fields = json.loads(config)
    for key in ("rank_pattern", "alpha_pattern", "target_parameters", "target_modules"):
        fields[key] = None
    tensors = renamed(engine, weights, load_file(folder / TENSORS), form)

    assert same(read_upload(engine, json.dumps(fields).encode(), save(tensors)), weights)


def test_experts_of_another_model_are_refused_by_name(new_engine: NewEngine, tmp_path: Path) -> None:
    engine = new_engine("qwen3_moe")
    _, config, folder = exported(engine, AdapterSpec(4, seed=1, train_attn=False), tmp_path)
    content = (folder / TENSORS).read_bytes()
    with pytest.raises(ImportRefused, match=r"needs \[7 \* rank, 64\] and \[48, rank \* 7\]"):
        read_upload(new_engine("qwen2_moe"), *without_layer_0(config, folder))
    with pytest.raises(ImportRefused, match=r"has no module model\.layers\.0\.mlp\.experts"):
        read_upload(new_engine("qwen3"), config, content)

    fields = {**json.loads(config), "target_parameters": ["experts.down_proj"]}
    with pytest.raises(Invalid, match=r"target_parameters of adapter_config\.json does not name"):
        read_upload(engine, json.dumps(fields).encode(), content)


def without_layer_0(config: bytes, folder: Path) -> tuple[bytes, bytes]:
    tensors = load_file(folder / TENSORS)
    left = {name: each for name, each in tensors.items() if ".layers.1." in name}
    return config, save(left, {"experts": "shared_outer"})
