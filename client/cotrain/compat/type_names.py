"""Aliases of cotrain's types with the names of the hosted services' SDK, where the names differ."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from cotrain.wire.checkpoints import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsResponse,
)
from cotrain.wire.rest import (
    ActiveStatusQuery,
    CancelledStatusQuery,
    ClientFinishedStatusQuery,
    FailedRunReason,
    FailedStatusQuery,
    FinishReason,
    FinishReasonType,
    SessionFinished,
    StatusQuery,
)
from cotrain.wire.runs import (
    AdamParams,
    CreateModelResponse,
    ForwardBackwardOutput,
    OptimizerConfig,
    OptimStepResponse,
    RequestFailedResponse,
    TryAgainResponse,
    UnloadModelResponse,
)
from cotrain.wire.sampling import (
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    SamplingSessionTarget,
    SaveWeightsForSamplerResponse,
)
from cotrain.wire.tensors import DType, TensorData
from cotrain.wire.usage import (
    CheckpointUsage,
    PrefillUsage,
    SampleUsage,
    StorageItem,
    StorageResponse,
    TrainingUsage,
    UsageEvent,
    UsageInfo,
    UsageSession,
)

# ---- Training and sampling -----------------------------------------------------------------------

ModelID = str
RequestID = str
TensorDtype = DType
LossFnInputs = dict[str, TensorData]
LossFnOutput = dict[str, TensorData]
LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
OptimParams = AdamParams
AdamOptimizerConfig = OptimizerConfig
SamplingClientKind = Literal["snapshot", "inflight"]
StopReason = Literal["length", "stop"]
SaveWeightsForSamplerResponseInternal = SaveWeightsForSamplerResponse
SaveWeightsExternalResponseInternal = SaveWeightsExternalResponse


class RequestErrorCategory(StrEnum):
    """Cause of a failure; equal to `RequestFailed.category`, which is plain text."""

    Unknown = "unknown"
    Server = "server"
    User = "user"


# ---- Futures -------------------------------------------------------------------------------------

FuturesRetrieveRequest = RetrieveFuturesRequest
FuturesRetrieveResponse = RetrieveFuturesResponse
SamplingSessionFuturesTarget = SamplingSessionTarget
FutureRetrieveResponse = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)

# ---- Sessions ------------------------------------------------------------------------------------

ActiveSessionStatusQuery = ActiveStatusQuery
CancelledSessionStatusQuery = CancelledStatusQuery
ClientFinishedSessionStatusQuery = ClientFinishedStatusQuery
FailedSessionStatusQuery = FailedStatusQuery
SessionStatusQuery = StatusQuery
ClientSessionFinished = SessionFinished
ClientSessionFinishReason = FinishReason
ClientSessionFinishReasonType = FinishReasonType
SessionFailedReason = FailedRunReason
SessionFailedTrainingRunReason = FailedRunReason

# ---- Usage ---------------------------------------------------------------------------------------

BillingEventInfo = UsageInfo
BillingUsageEvent = UsageEvent
BillingUsageSession = UsageSession
CheckpointBillingEvent = CheckpointUsage
CurrentCheckpointStorageUsageItem = StorageItem
CurrentCheckpointStorageUsageResponse = StorageResponse
SamplingPrefillBillingEvent = PrefillUsage
SamplingSampleBillingEvent = SampleUsage
TrainingBillingEvent = TrainingUsage
