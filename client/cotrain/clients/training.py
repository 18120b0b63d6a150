"""TrainingClient: one run. The server executes its requests in the order of these calls."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from typing_extensions import override

from cotrain.clients.custom_loss import CustomLoss, LossFn, LossHandle
from cotrain.clients.fork import adams_of, fork_run
from cotrain.clients.retention import rules_of, then_prune
from cotrain.clients.run_results import Evaluation, TrainOutput, joined, numbers_of, weights_of
from cotrain.clients.sampling import SamplingClient
from cotrain.clients.session import Session
from cotrain.clients.sweep import Sweep
from cotrain.clients.tokenizer import load_tokenizer
from cotrain.clients.unsupported_arguments import Ready, accepts_hosted
from cotrain.errors import UnsupportedInput
from cotrain.requests.chunks import combine
from cotrain.requests.futures import Future, both_ways, submitted
from cotrain.requests.polling import post_and_wait
from cotrain.requests.run_requests import RunRequests
from cotrain.transport.http import url_of
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from cotrain.wire.constants import CUSTOM
from cotrain.wire.custom_loss import LOSS_ID
from cotrain.wire.datums import Datum, ForwardBackwardOutput, datums_of
from cotrain.wire.rest import LogMetricsRequest, LogMetricsResponse, RewindRequest, RewindResponse, TrainingRunHistory
from cotrain.wire.runs import (
    AdamParams,
    GetInfoRequest,
    GetInfoResponse,
    MuonParams,
    NewRun,
    OptimStepRequest,
    OptimStepResponse,
    PlacedReverseKlRequest,
    ReverseKlDatum,
    ReverseKlResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from cotrain.wire.sampling import SaveWeightsForSamplerRequest, SaveWeightsForSamplerResponse


class TrainingClient(Ready):
    """Client of one run, which trains one adapter.

    Every call takes its `seq_id`, its position in the order of the run, before it returns. So
    `forward_backward` and `optim_step` may be sent together and awaited afterwards; sent together, they
    share a clock cycle. An `_async` method also sends at once, awaited or not. Awaiting it returns the
    same future once the server has accepted the request; awaiting that future returns the result.
    """

    def __init__(self, session: Session, model_id: str, base_model: str) -> None:
        self._session = session
        self._connection = session.connection
        self._loop = self._connection.loop
        self._transport = self._connection.transport
        self._model_id = model_id
        self._base_model = base_model
        self._requests = RunRequests(self._connection, model_id)

    @property
    def model_id(self) -> str:
        """Id of the run on the server."""
        return self._model_id

    @property
    def requests(self) -> RunRequests:
        """Sender of the run's requests, for a sweep that sends some of them."""
        return self._requests

    @override
    def __repr__(self) -> str:
        at = f"{self._base_model} at {self._connection!r}"
        return f"<TrainingClient of {self._requests!r}, {at}>"

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute log-probs and the loss; gradients are unchanged."""
        return self._requests.send_pass(data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submitted(forward)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to the accumulated gradient of the run.

        A failed request adds nothing. Losses are sums over tokens and datums, so splitting a batch over
        several calls does not change the sum. Raises UnsupportedInput for a datum that is not text, or for
        more data than the server accepts in one request.
        """
        return self._requests.send_pass(data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submitted(forward_backward)

    @accepts_hosted("learning_rate", "lr")
    def optim_step(
        self, adam_params: AdamParams | MuonParams | None = None, *, optim_params: AdamParams | MuonParams | None = None
    ) -> Future[OptimStepResponse]:
        """Apply one step of the run's optimizer with the accumulated gradient, then zero the gradient.

        A run with Muon takes MuonParams. `optim_params` is an alias of `adam_params`. Raises UnsupportedInput if
        both are passed.
        """
        if adam_params is not None and optim_params is not None:
            raise UnsupportedInput("adam_params and optim_params are one argument: give one of them")
        params = adam_params or optim_params or AdamParams()
        if not isinstance(params, AdamParams | MuonParams):
            raise UnsupportedInput(f"adam_params must be AdamParams(learning_rate=…), not {params!r:.80}")
        named = "adam_params" if isinstance(params, AdamParams) else "optimizer_params"
        return self._requests.post("optim_step", OptimStepRequest, OptimStepResponse, **{named: params})

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        keep: str | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state at this position in the run's order; returns their path.

        The future is done when they are on the server's disk. A name in use fails, or is replaced if `overwrite` is
        set. Without a name, the checkpoint is named after its position in the order.

        `keep` then deletes older checkpoints of this run. `"last:3, best:eval/nll:2"` keeps the newest three and the
        two with the lowest `eval/nll`; see docs/guide/checkpoints.md. Raises UnsupportedInput for an invalid rule.
        """
        rules = None if keep is None else rules_of(keep)
        saved = self._requests.post(
            "save_weights",
            SaveWeightsRequest,
            SaveWeightsResponse,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return saved if rules is None else then_prune(self._loop, self._transport, self._model_id, saved, rules)

    save_state_async = submitted(save_state)

    def load_state(self, path: str, weights_access_token: str | None = None) -> Future[LoadWeightsResponse]:
        """Load the weights of a checkpoint, with a new optimizer state and no gradient.

        The checkpoint must match the base model, rank and trained modules of this run. A checkpoint of
        another tenant requires that tenant's key as `weights_access_token`, unless it is published. The
        future raises CheckpointNotFound if the checkpoint does not exist.
        """
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Load weights, moments and step count, to continue exactly where the checkpoint was saved."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> Future[SaveWeightsExternalResponse]:
        """Save the adapter as files to download, encrypted for `age1…` recipients if any are passed."""
        return self._requests.post(
            "save_weights_external",
            SaveWeightsExternalRequest,
            SaveWeightsExternalResponse,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )

    save_weights_external_async = submitted(save_weights_external)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save the weights at this position in the run's order, for sampling; returns their path.

        A name in use moves to these weights; samplers created from it before keep the old weights.
        """
        return self._save_for_sampler(path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata)

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    @accepts_hosted("kind", "record_stability_info", "retry_config")
    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Save the weights at this position in the run's order, and return a client that samples from them.

        With a name, the weights can be loaded again. Without one, they are deleted after their last use.
        Blocks until the weights are saved; requests sent earlier continue.
        """
        return self._loop.run(self._sampler_of(self._save_for(name)))

    @accepts_hosted("kind", "record_stability_info", "retry_config")
    def save_weights_and_get_sampling_client_async(
        self, name: str | None = None
    ) -> Coroutine[Any, Any, SamplingClient]:
        """Sample from the weights of this call; see `save_weights_and_get_sampling_client`."""
        return self._loop.run_async(self._sampler_of(self._save_for(name)))

    @accepts_hosted("record_stability_info", "retry_config")
    async def _create_sampling_client(self, model_path: str) -> SamplingClient:
        """Create a sampler of saved weights of any run."""
        return await self._session.create_sampler(model_path=model_path)

    create_sampling_client, create_sampling_client_async = both_ways(_create_sampling_client)

    def fork(
        self, n: int | None = None, lr: Sequence[float] | None = None, *, name: str | None = None
    ) -> Sweep[TrainingClient]:
        """Copy this run, at this position in its order, to `n` new runs, as one sweep.

        The copies have its weights and its optimizer state, and each the next learning rate of `lr`; without
        `n` as many as rates. All are made in one cycle, from the memory of the worker. This run continues.
        Blocks until they exist. Raises UnsupportedInput, RequestFailed or APIError.
        """
        return self._loop.run(self._fork(n, lr, name))

    def fork_async(
        self, n: int | None = None, lr: Sequence[float] | None = None, *, name: str | None = None
    ) -> Coroutine[Any, Any, Sweep[TrainingClient]]:
        """Copy this run to new ones; see `fork`."""
        return self._loop.run_async(self._fork(n, lr, name))

    def get_tokenizer(self) -> Any:
        """Load the base model's tokenizer; needs transformers. Raises TokenizerMissing."""
        return load_tokenizer(self._connection, self._base_model)

    async def _get_info(self) -> GetInfoResponse:
        """Return the base model and LoRA settings of this run."""
        request = GetInfoRequest(model_id=self._model_id)
        return await self._transport.post("get_info", request, reader(GetInfoResponse))

    get_info, get_info_async = both_ways(_get_info)

    async def _history(self, after_step: int = -1) -> TrainingRunHistory:
        """Return the metrics of this run's steps and evaluations after `after_step`; `.points` are in order.

        The server stores the history with the run: see docs/reference/runs.md.
        """
        path = url_of("training_runs", self._model_id, "history")
        query = f"{path}?after_step={after_step}"
        return await self._transport.get(query, reader(TrainingRunHistory))

    history, history_async = both_ways(_history)

    async def _unload(self) -> None:
        """Close the run and free its memory on the server; pending requests fail."""
        request = UnloadModelRequest(model_id=self._model_id)
        await post_and_wait(self._transport, "unload_model", request, UnloadModelResponse)

    unload, unload_async = both_ways(_unload)

    # ---- Calls that the hosted services lack ------------------------------------------------------

    def rewind(self, step: int) -> Future[RewindResponse]:
        """Return this run to its state after optimizer step `step`, at this position in the order.

        On a CPU, weights, both Adam moments and later steps are then equal to the bit to those of a run that
        ended at `step`. A pending gradient and the history after it are dropped, checkpoints stay. The
        future raises RequestFailed, with the steps within reach, for a step that the log does not hold.
        """
        return self._requests.post("rewind", RewindRequest, RewindResponse, step=step)

    rewind_async = submitted(rewind)

    def log(self, metrics: Mapping[str, float]) -> Future[LogMetricsResponse]:
        """Record own metrics at this position in the run's order, such as `{"reward/mean": 0.4}`.

        They are kept with the run's history, drawn on its page, and stored with checkpoints that are saved
        before the next optimizer step. Values are finite numbers. There are at most 64 in a call, and 128
        names in a run. Raises UnsupportedInput for another value, ValidationError for an invalid name.
        """
        return self._log(metrics=numbers_of(metrics))

    log_async = submitted(log)

    def evaluate(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        name: str = "eval",
    ) -> Future[Evaluation]:
        """Compute the loss on a data set of any size without a gradient, in the cycles of other runs' training.

        The history receives it as the metric `<name>/nll` for cross_entropy, `<name>/loss` for other
        losses. If a request of the evaluation fails, or another thread uses the run during it, the
        history has no value. Raises UnsupportedInput for empty data.
        """
        data = datums_of(data)
        if not data:
            raise UnsupportedInput("data is empty: an evaluation needs at least one Datum")
        metric = f"{name}/{'nll' if loss_fn == 'cross_entropy' else 'loss'}"
        started = self._log(evaluation=metric)
        passes = self._requests.send_forwards(data, loss_fn, loss_fn_config)
        ended = self._log(evaluation=metric, passes=len(passes))
        weight_sum, tokens = weights_of(data)

        async def finish() -> Evaluation:
            outputs = [await each for each in passes]
            await started
            await ended
            whole = combine(outputs)
            return Evaluation(whole.metrics["loss:sum"], weight_sum, tokens, whole.loss_fn_outputs)

        return joined(self._loop, (started, ended, *passes), finish(), what="an evaluation")

    evaluate_async = submitted(evaluate)

    # ---- custom losses, and a step in one call ----------------------------------------------------

    @accepts_hosted("loss_type_input")
    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: LossFn | LossHandle
    ) -> Future[ForwardBackwardOutput]:
        """Compute a custom loss and add its gradient to the accumulated gradient of the run.

        `loss_fn(data, logprobs)` receives the datums and one float32 torch tensor of log-probs for each,
        with the shape of its `target_tokens`. It returns the loss and a dict of numbers for the metrics. It
        runs on a thread of this client after the forward; the `seq_id` of the backward is reserved before
        this method returns. Later requests of the run wait for it, at most `COTRAIN_GAP_LIMIT_S` of the
        server. A `LossHandle` of `ServiceClient.create_custom_loss` runs on the server, in one pass. Raises
        TorchMissing, or UnsupportedInput for a datum without targets.
        """
        if isinstance(loss_fn, LossHandle):
            return self.forward_backward(data, CUSTOM, {LOSS_ID: loss_fn.loss_id})
        loss = CustomLoss(data, loss_fn)
        return self._requests.send_custom_pass(loss.forward_data(), loss)

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
        """Train one step on a batch: `forward_backward` and `optim_step`, sent together.

        `learning_rate` replaces that of `adam_params`. If the pass fails, the optimizer step still runs, with
        the gradient accumulated before; this is also true if both are sent separately.
        """
        params = adam_params or AdamParams()
        if learning_rate is not None:
            params = AdamParams(**{**dict(params), "learning_rate": learning_rate})
        passed = self.forward_backward(data, loss_fn, loss_fn_config)
        stepped = self.optim_step(params)

        async def finish() -> TrainOutput:
            return TrainOutput(await passed, await stepped)

        return joined(self._loop, (passed, stepped), finish(), what="a train call")

    train_async = submitted(train)

    def forward_backward_reverse_kl(
        self, reference_model_path: str, data: Sequence[ReverseKlDatum], temperature: float = 1.0
    ) -> Future[ReverseKlResponse]:
        """Add the gradient of `sum weight * KL(run || reference)` over the whole vocabulary.

        The reference is a checkpoint or the base model; it is not changed. See docs/guide/reverse-kl.md.
        """
        return self._requests.post(
            "mint/forward_backward_reverse_kl",
            PlacedReverseKlRequest,
            ReverseKlResponse,
            reference_model_path=reference_model_path,
            data=list(data),
            temperature=temperature,
        )

    forward_backward_reverse_kl_async = submitted(forward_backward_reverse_kl)

    def _fork(
        self, n: int | None, lr: Sequence[float] | None, name: str | None
    ) -> Coroutine[Any, Any, Sweep[TrainingClient]]:
        """Save the run at once, and return the work that makes copies of it."""
        adams = adams_of(n, lr)  # before the save, which takes a position
        number = next(self._session.sampler_numbers)
        saved = self._save_for_sampler(sampling_session_seq_id=number, optimizer=True)
        return fork_run(self._session, self._model_id, saved, adams, name, self._client_of)

    def _client_of(self, run: NewRun) -> TrainingClient:
        return TrainingClient(self._session, run.model_id, self._base_model)

    def _log(self, **what: Any) -> Future[LogMetricsResponse]:
        return self._requests.post("log_metrics", LogMetricsRequest, LogMetricsResponse, **what)

    def _save_for(self, name: str | None) -> Future[SaveWeightsForSamplerResponse]:
        if name is not None:
            return self._save_for_sampler(path=name)
        return self._save_for_sampler(sampling_session_seq_id=next(self._session.sampler_numbers))

    def _save_for_sampler(self, **what: Any) -> Future[SaveWeightsForSamplerResponse]:
        return self._requests.post(
            "save_weights_for_sampler", SaveWeightsForSamplerRequest, SaveWeightsForSamplerResponse, **what
        )

    def _load(self, path: str, token: str | None, *, optimizer: bool) -> Future[LoadWeightsResponse]:
        return self._requests.post(
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
            return await self._session.sampler(answer.sampling_session_id, self._base_model)
        return await self._session.create_sampler(model_path=answer.path)
