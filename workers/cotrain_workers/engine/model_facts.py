"""Facts about a base model and its engine for other processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.expert_choice import ExpertChoices
from cotrain_workers.engine.model.vision import ImageFacts
from cotrain_workers.engine.numerics import Numerics
from cotrain_workers.engine.spec import Family


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the base model and this engine for other processes."""

    model: str  # as given to `Engine.load`
    architecture: str
    vocab_size: int  # rows of the embedding, padded ones included
    context_length: int
    num_parameters: int
    max_rank: int
    tied_embeddings: bool  # whether the unembedding is the embedding's matrix
    eos_token_ids: tuple[int, ...]  # tokens that end a generation, ascending; may be empty
    modules_by_family: Mapping[Family, int]  # number of modules that each train_* flag covers
    numerics: Numerics
    lora_fallback: str  # why LoRA is not computed by the fastest backend; empty where it is, and on a CPU
    longest_datum: int = 0  # tokens of a datum that fits into memory
    expert_choices: ExpertChoices | None = None  # None: no experts, or given ones cannot be used
    images: ImageFacts | None = None  # None: the model reads text only

    @property
    def numerics_id(self) -> str:
        """Identifier of the numerics. With equal ids, the same plan produces the same bits."""
        return self.numerics.id


def model_facts(
    model: str, base: BaseModel, numerics: Numerics, lora_fallback: str, longest_datum: int = 0
) -> ModelFacts:
    """Collect the facts about a base model and its engine."""
    modules: dict[Family, int] = {}
    for target in base.targets:
        modules[target.family] = modules.get(target.family, 0) + 1
    return ModelFacts(
        model=model,
        architecture=base.architecture,
        vocab_size=base.vocab_size,
        context_length=base.context_length,
        num_parameters=base.num_parameters,
        max_rank=base.hidden_size,  # beyond it LoRA is of no lower rank than the weights
        tied_embeddings=base.tied_embeddings,
        eos_token_ids=base.eos_token_ids,
        modules_by_family=modules,
        numerics=numerics,
        lora_fallback=lora_fallback,
        longest_datum=min(longest_datum or base.context_length, base.context_length),
        expert_choices=base.expert_choices,
        images=base.vision.facts if base.vision else None,
    )
