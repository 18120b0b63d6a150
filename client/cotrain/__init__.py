"""cotrain: train LoRA adapters on a server that many people share.

from cotrain import Datum, ModelInput, ServiceClient

with ServiceClient() as service:
    run = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=16)
    loss = run.forward_backward(data, "cross_entropy")
    step = run.optim_step()
    print(loss.result().metrics, step.result().metrics)
"""

from cotrain import types
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
    UnprocessableEntityError,
    UnsupportedInput,
)
from cotrain.futures import Future
from cotrain.service import ServiceClient
from cotrain.training import TrainingClient
from cotrain.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData
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
    "ServiceClient",
    "SettingsMissing",
    "TensorData",
    "TrainingClient",
    "UnprocessableEntityError",
    "UnsupportedInput",
    "__version__",
    "types",
]
