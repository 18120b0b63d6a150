"""cotrain: client to train LoRA adapters, and sample from them, on a shared server.

from cotrain import Datum, ModelInput, SamplingParams, ServiceClient

with ServiceClient() as service:
    run = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=16)
    loss = run.forward_backward(data, "cross_entropy")
    step = run.optim_step()
    print(loss.result().metrics, step.result().metrics)
    sampler = run.save_weights_and_get_sampling_client()
    print(sampler.sample(prompt, 4, SamplingParams(max_tokens=32)).result().sequences)
    path = run.save_state("final").result().path
    run = service.create_training_client_from_state_with_optimizer(path)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from cotrain import errors
from cotrain.errors import *  # noqa: F403  # its `__all__`, and no name twice
from cotrain.version import __version__

if TYPE_CHECKING:
    from cotrain import data, exceptions, learning_rates, losses, mint, types
    from cotrain.clients.rest import RestClient
    from cotrain.clients.rest import RestClient as AdminClient  # name of the hosted SDK
    from cotrain.clients.run_results import Evaluation, TrainOutput
    from cotrain.clients.sampling import SamplingClient
    from cotrain.clients.service import ServiceClient
    from cotrain.clients.sweep import Sweep, SweepOutput, Trial
    from cotrain.clients.training import TrainingClient
    from cotrain.requests.futures import Future, Submitted
    from cotrain.requests.futures import Future as APIFuture  # name of the hosted SDK
    from cotrain.transport.responses import RetryPolicy
    from cotrain.types import (
        AdamOptimizerConfig,
        AdamParams,
        Checkpoint,
        CheckpointType,
        Datum,
        DmelChunk,
        EncodedTextChunk,
        ForwardBackwardOutput,
        LoraConfig,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
        ParsedCheckpointTinkerPath,
        RoutedExperts,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )

__all__ = [
    "APIFuture", "AdamOptimizerConfig", "AdamParams", "AdminClient", "Checkpoint", "CheckpointType", "Datum",
    "DmelChunk", "EncodedTextChunk", "Evaluation", "ForwardBackwardOutput", "Future", "LoraConfig", "ModelID",
    "ModelInput", "ModelInputChunk", "OptimParams", "OptimStepRequest", "OptimStepResponse",
    "ParsedCheckpointTinkerPath", "RestClient", "RetryPolicy", "RoutedExperts", "SampleRequest", "SampleResponse",
    "SampledSequence", "SamplingClient", "SamplingParams", "ServiceClient", "StopReason", "Submitted", "Sweep",
    "SweepOutput", "TensorData", "TensorDtype", "TrainOutput", "TrainingClient", "TrainingRun", "Trial",
    "__version__", "data", "exceptions", "learning_rates", "losses", "mint", "types",
]  # fmt: skip
__all__ += errors.__all__

_MODULES = {"data", "exceptions", "learning_rates", "losses", "mint", "types"}
#: Module of each public name that is neither a module, nor in `errors` or `types`.
_HOMES = {
    "AdminClient": "clients.rest", "APIFuture": "requests.futures", "Evaluation": "clients.run_results",
    "Future": "requests.futures", "RestClient": "clients.rest", "RetryPolicy": "transport.responses",
    "SamplingClient": "clients.sampling", "ServiceClient": "clients.service", "Submitted": "requests.futures",
    "Sweep": "clients.sweep", "SweepOutput": "clients.sweep", "TrainOutput": "clients.run_results",
    "TrainingClient": "clients.training", "Trial": "clients.sweep",
}  # fmt: skip
_HOSTED = {"AdminClient": "RestClient", "APIFuture": "Future"}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name on its first use: a process of a server needs `cotrain.wire` alone."""
        if name in _MODULES:
            return import_module(f"cotrain.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        home = import_module(f"cotrain.{_HOMES.get(name, 'types')}")
        found = globals()[name] = getattr(home, _HOSTED.get(name, name))
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})
