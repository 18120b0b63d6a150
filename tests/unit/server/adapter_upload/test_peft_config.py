"""Configuration of an uploaded adapter: its ranks, scales and modules, and the refusal of other settings."""

from math import sqrt
from typing import Any, NoReturn

import pytest
from typing_extensions import override

from cotrain_server.adapter_upload.peft_config import _first_match
from cotrain_server.adapter_upload.peft_tensors import read_adapter
from cotrain_server.errors import Invalid
from tests.support.uploads import PREFIX, config, q_proj, raw_safetensors, safetensors

LAYER = "base_model.model.model.layers.0"


def pair(module: str, rank: int = 4) -> dict[str, tuple[int, int]]:
    return {f"{module}.lora_A.weight": (rank, 6), f"{module}.lora_B.weight": (10, rank)}


def scales(content: bytes, tensors: bytes) -> dict[str, float]:
    return {each.name: each.scale for each in read_adapter(content, tensors, 0).modules}


def test_an_adapter_becomes_a_run_with_its_rank_and_target_modules() -> None:
    adapter = read_adapter(config(), q_proj(), seed=7)
    (module,) = adapter.modules
    assert module.name == "model.layers.0.self_attn.q_proj"
    assert (module.a, module.b) == (f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight")
    assert module.scale == 8 / 4
    lora = adapter.lora
    assert (lora.rank, lora.seed, lora.alpha) == (4, 7, 32.0)
    assert (lora.train_attn, lora.train_mlp, lora.train_unembed) == (True, False, False)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"lora_alpha": 1}, 1 / 4),
        ({"lora_alpha": 7.5}, 7.5 / 4),
        ({"use_rslora": True}, 8 / sqrt(4)),
        ({"alpha_pattern": {"q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {"k_proj": 3}}, 8 / 4),
        ({"alpha_pattern": {"proj": 3}}, 8 / 4),
        ({"alpha_pattern": {"self_attn.q_proj": 3, "q_proj": 5}}, 3 / 4),
        ({"alpha_pattern": {"q_proj": 5, "self_attn.q_proj": 3}}, 5 / 4),
        ({"alpha_pattern": {r"self_attn\.q_proj": 3, "self_attn.q_proj": 5}}, 3 / 4),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {"^self_attn.q_proj": 3}}, 8 / 4),
        ({"alpha_pattern": {"q_proj": 3}, "use_rslora": True}, 3 / sqrt(4)),
        ({"alpha_pattern": {"[kq]_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {r".*\.layers\.\d\.self_attn\.\w+": 3}}, 3 / 4),
        ({"alpha_pattern": {r".*\.layers\.[1-9]\..*": 5, "(q|k)_proj": 3}}, 3 / 4),
        ({"alpha_pattern": {"q_pro": 5, "v_proj|q_proj": 3, "q_proj": 7}}, 3 / 4),
        ({"alpha_pattern": {"proj|[k]": 3}}, 8 / 4),
        ({"ensure_weight_tying": True}, 8 / 4),
    ],
)
def test_the_scale_is_that_of_peft(changes: dict[str, Any], scale: float) -> None:
    assert list(scales(config(**changes), q_proj()).values()) == [scale]


def test_the_largest_rank_is_that_of_the_run() -> None:
    tensors = safetensors({**pair(f"{LAYER}.self_attn.q_proj", 2), **pair(f"{LAYER}.mlp.up_proj")})
    content = config(target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 2})
    adapter = read_adapter(content, tensors, 0)
    assert adapter.lora.rank == 4
    assert [module.scale for module in adapter.modules] == [8 / 2, 8 / 4]
    assert (adapter.lora.train_attn, adapter.lora.train_mlp) == (True, True)


@pytest.mark.parametrize("module", ["base_model.model.lm_head", "base_model.model.model.unembed_tokens"])
def test_the_unembedding_has_two_names(module: str) -> None:
    content = config(target_modules=["lm_head"])
    adapter = read_adapter(content, safetensors(pair(module)), 0)
    assert [each.name for each in adapter.modules] == ["lm_head"]
    assert adapter.lora.train_unembed


def test_the_unembedding_under_both_names_is_refused() -> None:
    both = {**pair("base_model.model.lm_head"), **pair("base_model.model.model.unembed_tokens")}
    with pytest.raises(Invalid, match="twice"):
        read_adapter(config(target_modules=["lm_head"]), safetensors(both), 0)


REFUSED_CONFIGS = {
    "no JSON": (b"{", "not readable JSON"),
    "a list": (b"[]", "not a JSON object"),
    "a name twice": (b'{"r": 1, "r": 2}', "not readable JSON"),
    "not a number": (b'{"r": NaN}', "not readable JSON"),
    "no type": (config(peft_type=None), "peft_type"),
    "other method": (config(peft_type="IA3"), "peft_type"),
    "no rank": (config(r=None), "r must be"),
    "rank 0": (config(r=0), "r must be"),
    "rank true": (config(r=True), "r must be"),
    "rank in words": (config(r="4"), "r must be"),
    "no alpha": (config(lora_alpha=None), "lora_alpha"),
    "endless alpha": (config(lora_alpha=10**400), "lora_alpha"),
    "bias": (config(bias="all"), "bias"),
    "DoRA": (config(use_dora=True), "use_dora"),
    "more modules": (config(modules_to_save=["embed_tokens"]), "modules_to_save"),
    "LoRA bias": (config(lora_bias=True), "lora_bias"),
    "new tokens": (config(trainable_token_indices=[1]), "trainable_token_indices"),
    "other layers": (config(layer_replication=[[0, 1]]), "layer_replication"),
    "parameters": (config(target_parameters=["x"]), "target_parameters"),
    "activated LoRA": (config(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "LoftQ": (config(loftq_config={"loftq_bits": 4}), "loftq_config"),
    "PiSSA": (config(init_lora_weights="pissa"), "init_lora_weights"),
    "OLoRA": (config(init_lora_weights="olora"), "init_lora_weights"),
    "an option of tomorrow": (config(use_magic=True), "use_magic"),
    "pattern that is no map": (config(rank_pattern=[1]), "rank_pattern"),
    "pattern to texts": (config(alpha_pattern={"q_proj": "1"}), "alpha_pattern"),
    "target without end": (config(target_modules=r"((.+)+)+!"), "target_modules: its regular"),
    "no pattern": (config(rank_pattern={"q_proj(": 4}), "rank_pattern contains an invalid regular"),
    "many patterns": (config(rank_pattern={f"q{i}|k": 4 for i in range(1001)}), "more than 1000 regular"),
    "pattern of all": (config(rank_pattern={".*": 1}), "has rank"),
    "target pattern of others": (config(target_modules=r".*\.mlp\..*"), "target_modules"),
    "target of another model": (config(target_modules="q_proj"), "target_modules"),
    "other rank": (config(r=8), "has rank"),
    "pattern of another rank": (config(rank_pattern={"q_proj": 8}), "has rank"),
    "other targets": (config(target_modules=["k_proj"]), "target_modules"),
}


@pytest.mark.parametrize(("content", "key"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS)
def test_a_setting_beyond_plain_lora_is_refused_by_its_key(content: bytes, key: str) -> None:
    with pytest.raises(Invalid, match=key):
        read_adapter(content, q_proj(), 0)


REFUSED_TENSORS = {
    "none": ({}, "no LoRA matrices"),
    "no B": ({f"{PREFIX}.lora_A.weight": (4, 6)}, "lora_B.weight of model.layers.0"),
    "no A": ({f"{PREFIX}.lora_B.weight": (6, 4)}, "lora_A.weight of model.layers.0"),
    "base weights alone": ({"base_model.model.lm_head.base_layer.weight": (4, 6)}, "no LoRA matrices"),
    "other base weights": ({f"{PREFIX}.base_layer.weight": (4, 6)}, "save_embedding"),
    "DoRA": ({f"{PREFIX}.lora_magnitude_vector": (4,)}, "lora_magnitude_vector"),
    "embedding LoRA": ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 6)}, "lora_embedding_A"),
    "LoRA bias": ({f"{PREFIX}.lora_B.bias": (4,)}, "lora_B.bias"),
    "name of an adapter": ({f"{PREFIX}.lora_A.default.weight": (4, 6)}, "lora_A.default"),
    "no prefix": ({"model.layers.0.self_attn.q_proj.lora_A.weight": (4, 6)}, "cannot be imported"),
    "other module": ({f"{LAYER}.mlp.experts.w4.lora_A.weight": (4, 6)}, "LoRA is trained here on"),
    "one dimension": (
        {f"{PREFIX}.lora_A.weight": (4,), f"{PREFIX}.lora_B.weight": (4,)},
        r"lora_B.weight has rank \[\]",
    ),
    "three dimensions": ({f"{PREFIX}.lora_A.weight": (4, 6), f"{PREFIX}.lora_B.weight": (1, 4, 6)}, "has rank"),
}


@pytest.mark.parametrize(("shapes", "key"), REFUSED_TENSORS.values(), ids=REFUSED_TENSORS)
def test_a_tensor_that_is_not_a_lora_matrix_is_refused_by_its_key(shapes: dict[str, tuple[int, ...]], key: str) -> None:
    with pytest.raises(Invalid, match=key):
        read_adapter(config(), safetensors(shapes), 0)


@pytest.mark.parametrize("targets", [None, "all-linear", r".*\.self_attn\.[qk]_proj"])
def test_target_modules_given_as_a_pattern_are_read_from_the_tensors(targets: str | None) -> None:
    assert len(read_adapter(config(target_modules=targets), q_proj(), 0).modules) == 1


def test_half_precision_is_accepted() -> None:
    assert read_adapter(config(), q_proj(dtype="F16"), 0).lora.rank == 4


def test_embeddings_saved_by_peft_are_left_to_the_worker() -> None:
    shapes = {
        **pair("base_model.model.lm_head"),
        "base_model.model.lm_head.base_layer.weight": (10, 6),
        "base_model.model.model.embed_tokens.weight": (10, 6),
    }
    adapter = read_adapter(config(target_modules=["lm_head"]), safetensors(shapes), 0)
    assert [module.name for module in adapter.modules] == ["lm_head"]


def test_tied_weights_with_an_adapted_unembedding_are_refused() -> None:
    content = config(target_modules=["lm_head"], ensure_weight_tying=True)
    with pytest.raises(Invalid, match="ensure_weight_tying is not supported where lm_head"):
        read_adapter(content, safetensors(pair("base_model.model.lm_head")), 0)


def test_a_file_that_is_not_safetensors_is_refused() -> None:
    with pytest.raises(Invalid, match="not a safetensors file"):
        read_adapter(config(), b"PK\3\4 pickled", 0)
    with pytest.raises(Invalid, match="not readable JSON"):
        read_adapter(config(), raw_safetensors(b"{{"), 0)


def test_patterns_are_looked_up_without_a_scan_of_every_module() -> None:
    class Listed(dict[str, tuple[int, int]]):
        @override
        def __iter__(self) -> NoReturn:
            raise AssertionError

        items = keys = values = __iter__

    assert _first_match(Listed({"b.q_proj": (7, 2), "q_proj": (9, 3)}), "a.b.q_proj", 1) == 2


def test_the_name_of_a_module_has_a_limited_length() -> None:
    name = "base_model.model." + "a." * 1_000 + "q_proj.lora_A.weight"
    with pytest.raises(Invalid, match="cannot be imported"):
        read_adapter(config(), safetensors({name: [4, 6]}), seed=0)
