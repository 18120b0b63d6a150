"""cotrain: train LoRA adapters, and sample from them, on a server that many people share.

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

from cotrain import exceptions, mint, types
from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ClientClosed,
    CotrainError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestFailed,
    SettingsMissing,
    TokenizerMissing,
    TorchMissing,
    UnprocessableEntityError,
    UnsupportedInput,
)
from cotrain.futures import Future, Submitted
from cotrain.rest import RestClient
from cotrain.sampling import SamplingClient
from cotrain.service import ServiceClient
from cotrain.train_call import TrainOutput
from cotrain.training import TrainingClient
from cotrain.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from cotrain.version import __version__

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "ClientClosed",
    "CotrainError",
    "Datum",
    "Future",
    "InternalServerError",
    "LoraConfig",
    "ModelInput",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestFailed",
    "RestClient",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "SettingsMissing",
    "Submitted",
    "TensorData",
    "TokenizerMissing",
    "TorchMissing",
    "TrainOutput",
    "TrainingClient",
    "UnprocessableEntityError",
    "UnsupportedInput",
    "__version__",
    "exceptions",
    "mint",
    "types",
]
