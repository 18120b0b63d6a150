"""Public types of the wire, as in `cotrain.types.Datum`: cotrain's names and the hosted SDK's.

Each module of `wire/` lists its public names in `__all__`. This module adds the hosted SDK's names for the same
classes, where the names differ.
"""

from enum import StrEnum
from typing import Literal

from cotrain.wire import checkpoints, custom_loss, datums, model, rest, runs, sampling, sessions, tensors, usage
from cotrain.wire.checkpoints import *  # noqa: F403  # its `__all__`, as with all below
from cotrain.wire.custom_loss import *  # noqa: F403
from cotrain.wire.datums import *  # noqa: F403
from cotrain.wire.model import *  # noqa: F403
from cotrain.wire.rest import *  # noqa: F403
from cotrain.wire.runs import *  # noqa: F403
from cotrain.wire.sampling import *  # noqa: F403
from cotrain.wire.sessions import *  # noqa: F403
from cotrain.wire.tensors import *  # noqa: F403
from cotrain.wire.usage import *  # noqa: F403

# ---- Training and sampling -----------------------------------------------------------------------

ModelID = str
RequestID = str
TensorDtype = tensors.DType
LossFnInputs = dict[str, tensors.TensorData]
LossFnOutput = dict[str, tensors.TensorData]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
OptimParams = runs.AdamParams
AdamOptimizerConfig = runs.OptimizerConfig
SamplingClientKind = Literal["snapshot", "inflight"]
StopReason = Literal["length", "stop"]
SaveWeightsForSamplerResponseInternal = sampling.SaveWeightsForSamplerResponse
SaveWeightsExternalResponseInternal = checkpoints.SaveWeightsExternalResponse


class RequestErrorCategory(StrEnum):
    """Cause of a failure; equal to `RequestFailed.category`, which is plain text."""

    Unknown = "unknown"
    Server = "server"
    User = "user"


# ---- Futures -------------------------------------------------------------------------------------

FuturesRetrieveRequest = sampling.RetrieveFuturesRequest
FuturesRetrieveResponse = sampling.RetrieveFuturesResponse
SamplingSessionFuturesTarget = sampling.SamplingSessionTarget
FutureRetrieveResponse = (
    runs.TryAgainResponse
    | datums.ForwardBackwardOutput
    | runs.OptimStepResponse
    | checkpoints.SaveWeightsResponse
    | checkpoints.LoadWeightsResponse
    | sampling.SaveWeightsForSamplerResponse
    | checkpoints.SaveWeightsExternalResponse
    | runs.CreateModelResponse
    | runs.UnloadModelResponse
    | runs.RequestFailedResponse
)

# ---- Sessions ------------------------------------------------------------------------------------

ActiveSessionStatusQuery = rest.ActiveStatusQuery
CancelledSessionStatusQuery = rest.CancelledStatusQuery
ClientFinishedSessionStatusQuery = rest.ClientFinishedStatusQuery
FailedSessionStatusQuery = rest.FailedStatusQuery
SessionStatusQuery = rest.StatusQuery
ClientSessionFinished = rest.SessionFinished
ClientSessionFinishReason = rest.FinishReason
ClientSessionFinishReasonType = rest.FinishReasonType
SessionFailedReason = rest.FailedRunReason
SessionFailedTrainingRunReason = rest.FailedRunReason

# ---- Usage ---------------------------------------------------------------------------------------

BillingEventInfo = usage.UsageInfo
BillingUsageEvent = usage.UsageEvent
BillingUsageSession = usage.UsageSession
CheckpointBillingEvent = usage.CheckpointUsage
CurrentCheckpointStorageUsageItem = usage.StorageItem
CurrentCheckpointStorageUsageResponse = usage.StorageResponse
SamplingPrefillBillingEvent = usage.PrefillUsage
SamplingSampleBillingEvent = usage.SampleUsage
TrainingBillingEvent = usage.TrainingUsage

__all__ = [
    "ActiveSessionStatusQuery", "AdamOptimizerConfig", "BillingEventInfo", "BillingUsageEvent",
    "BillingUsageSession", "CancelledSessionStatusQuery", "CheckpointBillingEvent",
    "ClientFinishedSessionStatusQuery", "ClientSessionFinishReason", "ClientSessionFinishReasonType",
    "ClientSessionFinished", "CurrentCheckpointStorageUsageItem", "CurrentCheckpointStorageUsageResponse",
    "FailedSessionStatusQuery", "FutureRetrieveResponse", "FuturesRetrieveRequest", "FuturesRetrieveResponse",
    "LossFnInputs", "LossFnOutput", "LossFnType", "ModelID", "OptimParams", "RequestErrorCategory", "RequestID",
    "SamplingClientKind", "SamplingPrefillBillingEvent", "SamplingSampleBillingEvent",
    "SamplingSessionFuturesTarget", "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerResponseInternal", "SessionFailedReason", "SessionFailedTrainingRunReason",
    "SessionStatusQuery", "StopReason", "TensorDtype", "TrainingBillingEvent",
]  # fmt: skip
__all__ += checkpoints.__all__
__all__ += custom_loss.__all__
__all__ += datums.__all__
__all__ += model.__all__
__all__ += rest.__all__
__all__ += runs.__all__
__all__ += sampling.__all__
__all__ += sessions.__all__
__all__ += tensors.__all__
__all__ += usage.__all__
