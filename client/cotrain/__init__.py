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

from cotrain import data, errors, exceptions, learning_rates, losses, mint, types
from cotrain.clients.evaluation import Evaluation
from cotrain.clients.rest import RestClient
from cotrain.clients.sampling import SamplingClient
from cotrain.clients.service import ServiceClient
from cotrain.clients.sweep import Sweep, SweepOutput, Trial
from cotrain.clients.train_output import TrainOutput
from cotrain.clients.training import TrainingClient
from cotrain.errors import *  # noqa: F403  # its `__all__`, and no name twice
from cotrain.requests.futures import Future, Submitted
from cotrain.transport.retries import RetryPolicy
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
from cotrain.version import __version__

# Names of the hosted SDK for the same classes.
AdminClient = RestClient
APIFuture = Future

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
