"""TrainingClient: one run, whose requests the server executes in the order of these calls.

One step of training as one call: a forward_backward and the optim_step behind it, sent together.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from typing_extensions import override

from cotrain.clients.custom_loss import CustomLoss, LossFn
from cotrain.clients.rest import url_of
from cotrain.clients.sampling import Samplers, SamplingClient
from cotrain.clients.tokenizer import load_tokenizer
from cotrain.compat.unsupported_arguments import absent, hosted
from cotrain.errors import UnsupportedInput
from cotrain.requests.connection import BackgroundLoop, Connection
from cotrain.requests.futures import Future, both_ways, submitted
from cotrain.requests.polling import wait_for_json
from cotrain.requests.run_requests import RunRequests
from cotrain.transport.http import reader
from cotrain.wire.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from cotrain.wire.datums import Datum
from cotrain.wire.rest import TrainingRunHistory
from cotrain.wire.runs import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
    PlacedReverseKlRequest,
    ReverseKlDatum,
    ReverseKlResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    UntypedAPIFuture,
)
from cotrain.wire.sampling import SaveWeightsForSamplerRequest, SaveWeightsForSamplerResponse
from cotrain.wire.tensors import TensorData

T = TypeVar("T")


@dataclass(frozen=True)
class TrainOutput:
    """What a step gave: the pass's losses, taken before the step, and the step's own numbers."""

    forward_backward: ForwardBackwardOutput
    optim_step: OptimStepResponse

    @property
    def loss(self) -> float:
        """The loss of the batch; see `ForwardBackwardOutput.loss`."""
        return self.forward_backward.loss

    @property
    def loss_fn_outputs(self) -> list[dict[str, TensorData]]:
        """Named arrays per datum in the order they were sent, as `forward_backward` gives them."""
        return self.forward_backward.loss_fn_outputs

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of both; a name that both have is the pass's."""
        return {**(self.optim_step.metrics or {}), **self.forward_backward.metrics}


def joined(
    loop: BackgroundLoop, passed: Future[ForwardBackwardOutput], stepped: Future[OptimStepResponse]
) -> Future[TrainOutput]:
    """Make one future of both: accepted and done when both are. It fails with the first that does."""

    async def accept() -> None:
        await passed.accepted_async()
        await stepped.accepted_async()

    async def finish() -> TrainOutput:
        return TrainOutput(await passed, await stepped)

    return Future(loop.start(accept()), loop.start(finish()), what="a train call")


class TrainingClient:
    """Trains one adapter. Every call takes its place in the run's order before it returns.

    So `forward_backward` and `optim_step` may be sent together and waited for afterwards; sent
    together, they share a clock cycle. An `_async` method sends at once too, awaited or not; await
    what it gives for the same future once the server has the request, and that for the result.
    """

    def __init__(
        self, connection: Connection, samplers: Samplers, model_id: str, base_model: str
    ) -> None:
        self._connection = connection
        self._loop = connection.loop
        self._transport = connection.transport
        self._samplers = samplers
        self._model_id = model_id
        self._base_model = base_model
        self._requests = RunRequests(connection, model_id)

    @property
    def model_id(self) -> str:
        """The run's id on the server."""
        return self._model_id

    @override
    def __repr__(self) -> str:
        at = f"{self._base_model} at {self._connection!r}"
        return f"<TrainingClient of {self._requests!r}, {at}>"

    def result(self, timeout: float | None = None) -> Self:
        """Give this client, which is there: programs for the hosted SDK await it, or ask for it."""
        return self

    def __await__(self) -> Generator[None, None, Self]:
        yield from ()
        return self

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Compute log-probs and the loss; leaves gradients as they are."""
        return self._requests.pass_over(data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submitted(forward)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to what the run has accumulated.

        All of it or, where it fails, nothing. Losses are sums over tokens and datums, so splitting
        a batch over calls changes no sum. Raises UnsupportedInput for a datum that is not text, or
        more than the server reads at once.
        """
        return self._requests.pass_over(data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submitted(forward_backward)

    def optim_step(
        self, adam_params: AdamParams | None = None, *, optim_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Take one AdamW step with the accumulated gradient, then zero the gradient.

        `optim_params` is another name of the same argument. Raises UnsupportedInput for both.
        """
        if adam_params is not None and optim_params is not None:
            raise UnsupportedInput(
                "adam_params and optim_params are one argument: give one of them"
            )
        params = adam_params or optim_params or AdamParams()
        return self._requests.ask(
            "optim_step", OptimStepRequest, OptimStepResponse, adam_params=params
        )

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Keep weights and optimizer as they are at this place in the order; gives their path.

        Done when they are on the server's disk. A name in use fails, or with `overwrite` moves here;
        without one, the place in the order names it.
        """
        return self._requests.ask(
            "save_weights",
            SaveWeightsRequest,
            SaveWeightsResponse,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )

    save_state_async = submitted(save_state)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Go on from the weights of a checkpoint, with a new optimizer and no gradient.

        It must be of this run's base model, rank and trained parts. Another tenant's needs its key,
        as `weights_access_token`, unless it is published. The future raises CheckpointNotFound where
        there is none.
        """
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Go on from a checkpoint as if nothing had come between: weights, moments and step count."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> Future[SaveWeightsExternalResponse]:
        """Keep the adapter as files to download, encrypted to `age1…` recipients where there are any."""
        return self._requests.ask(
            "save_weights_external",
            SaveWeightsExternalRequest,
            SaveWeightsExternalResponse,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )

    save_weights_external_async = submitted(save_weights_external)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Keep the weights as they are at this place in the order, for sampling; gives their path.

        A name that was used before moves to these weights; samplers made of it keep theirs.
        """
        return self._save_for_sampler(
            path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    @hosted("kind", "record_stability_info", "retry_config")
    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Keep the weights as they are at this place in the order, and sample from them.

        With a name they can be found again; without one they last as long as they are used.
        Blocks until they are kept; requests sent before go on running.
        """
        return self._loop.run(self._sampler_of(self._save_for(name)))

    @hosted("kind", "record_stability_info", "retry_config")
    def save_weights_and_get_sampling_client_async(
        self, name: str | None = None
    ) -> Coroutine[Any, Any, SamplingClient]:
        """Sample from the weights of this call; see `save_weights_and_get_sampling_client`."""
        return self._loop.run_async(self._sampler_of(self._save_for(name)))

    @hosted("record_stability_info", "retry_config")
    async def _create_sampling_client(self, model_path: str) -> SamplingClient:
        """Sample from weights that were saved, of whichever run."""
        return await self._samplers.create(model_path=model_path)

    create_sampling_client, create_sampling_client_async = both_ways(_create_sampling_client)

    def get_tokenizer(self) -> Any:
        """Load the base model's tokenizer; needs transformers. Raises TokenizerMissing."""
        return load_tokenizer(self._connection, self._base_model)

    async def _get_info(self) -> GetInfoResponse:
        """Ask what this run is."""
        request = GetInfoRequest(model_id=self._model_id)
        return await self._transport.post("get_info", request, reader(GetInfoResponse))

    get_info, get_info_async = both_ways(_get_info)

    async def _history(self, after_step: int = -1) -> TrainingRunHistory:
        """Ask what the steps and evaluations of this run found, those after a step; `.points` are in order.

        The server keeps it with the run: see docs/usage.md.
        """
        path = url_of("training_runs", self._model_id, "history")
        query = f"{path}?after_step={after_step}"
        return await self._transport.get(query, reader(TrainingRunHistory))

    history, history_async = both_ways(_history)

    async def _unload(self) -> None:
        """End the run and free its place on the server; requests still waiting fail."""
        request = UnloadModelRequest(model_id=self._model_id)
        future = await self._transport.post("unload_model", request, reader(UntypedAPIFuture))
        await wait_for_json(self._transport, future.request_id, UnloadModelResponse)

    unload, unload_async = both_ways(_unload)

    # ---- losses of one's own, and a step in one call ----------------------------------------------

    @hosted("loss_type_input")
    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: LossFn
    ) -> Future[ForwardBackwardOutput]:
        """Compute a loss of your own and add its gradient to what the run has accumulated.

        `loss_fn(data, logprobs)` gets the datums and one float32 torch tensor of log-probs for each,
        shaped as its `target_tokens`; it returns the loss and numbers for the metrics. It runs on
        a thread of this client once a forward is back; the backward behind it has its place already.
        Requests sent behind it wait for it, for no longer than the server's `COTRAIN_GAP_LIMIT_S`.
        Raises TorchMissing, or UnsupportedInput for a datum without targets.
        """
        loss = CustomLoss(data, loss_fn)
        return self._requests.pass_twice(loss.forward_data(), loss)

    forward_backward_custom_async = submitted(forward_backward_custom)

    def train(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        learning_rate: float | None = None,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> Future[TrainOutput]:
        """Take one step on a batch: `forward_backward` and `optim_step`, sent together.

        `learning_rate` replaces that of `adam_params`. Should the pass fail, the step is taken all
        the same, with the gradient that was there before, as it is when both are sent by hand.
        """
        params = adam_params or AdamParams()
        if learning_rate is not None:
            params = AdamParams(**{**dict(params), "learning_rate": learning_rate})
        passed = self.forward_backward(data, loss_fn, loss_fn_config)
        return joined(self._loop, passed, self.optim_step(params))

    train_async = submitted(train)

    def forward_backward_reverse_kl(
        self, reference_model_path: str, data: Sequence[ReverseKlDatum], temperature: float = 1.0
    ) -> Future[ReverseKlResponse]:
        """Add the gradient of `sum weight * KL(run || reference)` over the whole vocabulary.

        The reference is a checkpoint or the base model; it stays as it is. See docs/mint.md.
        """
        return self._requests.ask(
            "mint/forward_backward_reverse_kl",
            PlacedReverseKlRequest,
            ReverseKlResponse,
            reference_model_path=reference_model_path,
            data=list(data),
            temperature=temperature,
        )

    forward_backward_reverse_kl_async = submitted(forward_backward_reverse_kl)

    def _save_for(self, name: str | None) -> Future[SaveWeightsForSamplerResponse]:
        if name is not None:
            return self._save_for_sampler(path=name)
        return self._save_for_sampler(sampling_session_seq_id=self._samplers.reserve())

    def _save_for_sampler(self, **what: Any) -> Future[SaveWeightsForSamplerResponse]:
        return self._requests.ask(
            "save_weights_for_sampler",
            SaveWeightsForSamplerRequest,
            SaveWeightsForSamplerResponse,
            **what,
        )

    def _load(
        self, path: str, token: str | None, *, optimizer: bool
    ) -> Future[LoadWeightsResponse]:
        return self._requests.ask(
            "load_weights",
            LoadWeightsRequest,
            LoadWeightsResponse,
            path=path,
            optimizer=optimizer,
            weights_access_token=token,
        )

    async def _sampler_of(self, saved: Future[SaveWeightsForSamplerResponse]) -> SamplingClient:
        answer = await saved
        if answer.sampling_session_id is not None:
            return await self._samplers.client(answer.sampling_session_id, self._base_model)
        return await self._samplers.create(model_path=answer.path)

    if not TYPE_CHECKING:  # a type checker is to know every attribute, and so every mistake

        def __getattr__(self, name: str) -> NoReturn:
            raise absent(self, name)
