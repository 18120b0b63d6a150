"""ServiceClient: entry point to one server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Self

import httpx
from typing_extensions import override

from cotrain.clients import checkpoints, export
from cotrain.clients.custom_loss import LossHandle, PerDatumLossFn, trace
from cotrain.clients.rest import RestClient
from cotrain.clients.sampling import SamplingClient
from cotrain.clients.session import Session
from cotrain.clients.sweep import Sweep, Trial, read_settings, shown_settings
from cotrain.clients.training import TrainingClient
from cotrain.clients.unsupported_arguments import ExplainsAbsent, accepts_hosted
from cotrain.clients.upload import upload_adapter
from cotrain.errors import MalformedMessage, UnsupportedInput
from cotrain.requests.connection import Connection
from cotrain.requests.futures import Future, both_ways, submitted
from cotrain.requests.polling import post_and_wait
from cotrain.settings import client_settings
from cotrain.transport.responses import RetryPolicy, reader
from cotrain.wire.checkpoints import CopyWeightsRequest, CopyWeightsResponse, CreateFromWeightsRequest, OptimizerChoice
from cotrain.wire.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse, CustomLossInputRank
from cotrain.wire.rest import Checkpoint, FinishReasonType
from cotrain.wire.runs import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    InterpolateRequest,
    InterpolateResponse,
    LoraConfig,
    NewRun,
    OptimizerConfig,
)
from cotrain.wire.sessions import GetServerCapabilitiesResponse


class ServiceClient(ExplainsAbsent):
    """Factory of training and sampling clients. Use it from any thread or event loop, and close it when done.

    `base_url` and `api_key` default to `COTRAIN_BASE_URL` and `COTRAIN_API_KEY`. Sessions can be searched by
    `user_metadata`, `project_id` and `display_name`. `policy` limits the retries of a server that does not
    answer. `network` replaces the network, for tests.
    """

    @accepts_hosted("default_headers_overrides")
    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        user_metadata: dict[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        network: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        settings = client_settings(base_url, api_key)
        self._connection = Connection(settings, network=network, policy=policy)
        self._transport = self._connection.transport
        self._loop = self._connection.loop
        self._session = Session(self._connection, user_metadata, project_id=project_id, display_name=display_name)
        self._losses = 0

    @accepts_hosted("lora_alpha", "lora_rank", "target_modules")
    async def _create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        *,
        alpha: float = 32.0,
        dropout: float = 0.0,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, Any] | None = None,
        optimizer: OptimizerConfig | None = None,
        note: str | None = None,
        tags: Sequence[str] = (),
    ) -> TrainingClient:
        """Create a run: a new adapter on a base model. Its output matrix is zero, so it changes nothing yet.

        `optimizer` is AdamW, or `types.MuonOptimizerConfig()`. The adapter's output is scaled by `alpha / rank`. The
        only accepted dropout is 0. Lists, searches and the dashboard find the run by its note (at most 2,000
        characters) and tags (at most 16, each at most 64 characters). Waits until the server has created the run.
        Raises RequestFailed, APIError, or ValidationError for another dropout or a note or tag that is too long.
        """
        if not isinstance(optimizer, OptimizerConfig | None):
            raise UnsupportedInput(
                f"optimizer must be types.AdamOptimizerConfig() or types.MuonOptimizerConfig(), not {optimizer!r:.80}"
            )
        lora = LoraConfig(
            rank=rank,
            alpha=alpha,
            dropout=dropout,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        session_id, seq_id = await self._session.reserve_run()
        request = CreateModelRequest(
            session_id=session_id,
            model_seq_id=seq_id,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
            optimizer_config=optimizer or OptimizerConfig(),
            note=note,
            tags=list(tags) or None,
        )
        return self._client_of(await post_and_wait(self._transport, "create_model", request, NewRun), base_model)

    create_lora_training_client, create_lora_training_client_async = both_ways(_create_lora_training_client)

    async def _create_sweep(
        self,
        base_model: str,
        settings: Sequence[Mapping[str, Any]],
        *,
        name: str | None = None,
        note: str | None = None,
        tags: Sequence[str] = (),
    ) -> Sweep[TrainingClient]:
        """Create runs with different settings that train on the same batches, each sent once.

        Each entry of `settings` has any of `lr` (or `learning_rate`), `rank`, `seed`, and the other fields of
        `LoraConfig` and `AdamParams`. Runs without a `seed` get the same one. A sweep has at most 64 runs.
        They have the tag `sweep:NAME`. Raises UnsupportedInput for an unknown setting, and the errors of
        `create_lora_training_client`; no run stays then. See docs/guide/sweeps.md.
        """
        read, name = read_settings(settings), name or secrets.token_hex(4)
        shown = [shown_settings(given, adam) for given, (_, adam) in zip(settings, read, strict=True)]
        made = await asyncio.gather(
            *(
                self._create_lora_training_client(
                    base_model,
                    **dict(lora),
                    user_metadata={"sweep": name, "trial": number, **given},
                    note=note,
                    tags=[f"sweep:{name}", *tags],
                )
                for number, (given, (lora, _)) in enumerate(zip(shown, read, strict=True))
            ),
            return_exceptions=True,
        )
        runs = [each for each in made if isinstance(each, TrainingClient)]
        failed = next((each for each in made if isinstance(each, BaseException)), None)
        if failed:
            await asyncio.gather(*(run.unload_async() for run in runs), return_exceptions=True)
            raise failed
        trials = [Trial(number, shown[number], run, read[number][1]) for number, run in enumerate(runs)]
        return Sweep(self._connection, name, trials)

    create_sweep, create_sweep_async = both_ways(_create_sweep)

    async def _create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
    ) -> TrainingClient:
        """Create a run with the weights of a checkpoint and a new optimizer state.

        `base_model`, if passed, must be the checkpoint's. `weights_access_token` is an API key of the tenant
        that owns the checkpoint, if that is another tenant. Waits until the server has created the run.
        Raises RequestFailed, or NotFoundError if the checkpoint does not exist.
        """
        return await self._load_run(
            path,
            optimizer=False,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
            optimizer_config=OptimizerChoice(type=optimizer.type) if optimizer else None,
        )

    create_training_client_from_state, create_training_client_from_state_async = both_ways(
        _create_training_client_from_state
    )

    async def _create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        """Create a run that continues where a checkpoint was saved, including the optimizer state."""
        return await self._load_run(
            path,
            optimizer=True,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
        )

    (create_training_client_from_state_with_optimizer, create_training_client_from_state_with_optimizer_async) = (
        both_ways(_create_training_client_from_state_with_optimizer)
    )

    @accepts_hosted("record_stability_info", "retry_config")
    async def _create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Create a sampler of saved weights (`tinker://…`), or of an unchanged base model.

        Raises NotFoundError if the weights do not exist or belong to another tenant.
        """
        return await self._session.create_sampler(model_path=model_path, base_model=base_model)

    create_sampling_client, create_sampling_client_async = both_ways(_create_sampling_client)

    async def _create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> LossHandle:
        """Trace a loss of one datum with `torch.fx`, and return a handle for `forward_backward_custom`.

        `fn(logprobs, …)` receives the log-probs of a datum's targets, and the `loss_fn_inputs` that its other
        parameters name. `input_ranks` has the number of axes of each. It returns a scalar tensor and a dict of
        scalar tensors, with the names `custom/<name>:sum` or `custom/<name>:mean`. The server adds the losses of all
        datums. Raises UnsupportedInput for an operation that is not allowed: see docs/guide/custom-losses.md.
        """
        loss, name = trace(fn, input_ranks), getattr(fn, "__name__", "loss")
        self._losses += 1
        request = CreateCustomLossRequest(
            session_id=await self._session.id(), custom_loss_seq_id=self._losses, name=name, **dict(loss)
        )
        made = await post_and_wait(self._transport, "create_custom_loss", request, CreateCustomLossResponse)
        return LossHandle(name, tuple(loss.inputs), made.loss_id)

    create_custom_loss, create_custom_loss_async = both_ways(_create_custom_loss)

    def create_rest_client(self) -> RestClient:
        """Return a client for lists, checkpoints and usage. It opens no session and sends nothing yet."""
        return RestClient(self._connection)

    async def _get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models of the server."""
        return await self._transport.get("get_server_capabilities", reader(GetServerCapabilitiesResponse))

    get_server_capabilities, get_server_capabilities_async = both_ways(_get_server_capabilities)

    async def _upload_checkpoint(
        self,
        source: str | Path,
        base_model: str,
        name: str,
        *,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        progress: checkpoints.Progress | None = None,
    ) -> str:
        """Upload a LoRA adapter trained elsewhere; returns the path of the new checkpoint.

        `source` is a PEFT adapter: a folder with `adapter_config.json` and `adapter_model.safetensors`, or a tar of it
        (plain or gzip). Waits until it is stored. Raises BadRequestError if its files cannot be read, and RequestFailed
        if they do not fit the base model; both messages name the remedy. The client's thread calls `progress` with the
        bytes sent and the total.
        """
        return await upload_adapter(self._session, Path(source), base_model, name, ttl_seconds, user_metadata, progress)

    upload_checkpoint, upload_checkpoint_async = both_ways(_upload_checkpoint)

    async def _list_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of the account, newest first."""
        return await checkpoints.list_all(self._transport)

    list_checkpoints, list_checkpoints_async = both_ways(_list_checkpoints)

    async def _delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint; runs loaded from it keep their weights."""
        await self._transport.delete(checkpoints.checkpoint_url(path))

    delete_checkpoint, delete_checkpoint_async = both_ways(_delete_checkpoint)

    async def _delete_checkpoints(self, paths: Sequence[str]) -> list[str]:
        """Delete checkpoints; return the paths of those that existed. Raises ValueError for a malformed one."""
        return await checkpoints.delete_all(self._transport, paths)

    delete_checkpoints, delete_checkpoints_async = both_ways(_delete_checkpoints)

    async def _download_checkpoint(
        self, path: str, folder: str | Path, progress: checkpoints.Progress | None = None
    ) -> list[str]:
        """Download a checkpoint's adapter to a folder that plain PEFT, vLLM and merge tools read.

        Returns the file names. The next call resumes an interrupted download. The client's thread calls `progress` with
        the bytes downloaded and the total of all files, or 0 if the server does not send a size.
        """
        return await checkpoints.download(self._transport, path, Path(folder), progress)

    download_checkpoint, download_checkpoint_async = both_ways(_download_checkpoint)

    async def _download_checkpoint_archive(
        self, path: str, file: str | Path, progress: checkpoints.Progress | None = None
    ) -> None:
        """Download all files of a checkpoint as one tar. `progress` is as for `download_checkpoint`."""
        await checkpoints.download_archive(self._transport, path, Path(file), progress)

    download_checkpoint_archive, download_checkpoint_archive_async = both_ways(_download_checkpoint_archive)

    def export_checkpoint(
        self,
        path: str,
        output: str | Path,
        form: export.Form = "merged",
        *,
        base: str | Path | None = None,
        leave_out_unembed: bool = False,
        dtype: export.Dtype | None = None,
        limit: float | None = None,
        prove: bool = True,
        check: str | None = None,
        progress: export.ExportProgress = export.report_nothing,
    ) -> export.Exported:
        """Export a checkpoint for other programs, and compare the result's log-probs with the server's.

        The form `merged` is a whole model for transformers, and `peft` an adapter. The form `vllm` is the one
        of both that vLLM serves, and `gguf` an adapter for llama.cpp. The folder `output` must be missing or
        empty, and appears complete. The caller's thread calls `progress`. Needs the extra `export`.

        Args:
            base: Folder of the base model, or its name on the hub. The default is the server's name of it.
            leave_out_unembed: Drop the LoRA of the unembedding.
            dtype: Of merged weights. The default is the base model's.
            limit: Largest accepted difference in nats. The default is 1e-3 for float32 weights, otherwise 0.25.
            prove: False compares nothing.
            check: URL of a vLLM server that loads the result, and is compared too. With it, an existing export
                of this checkpoint in `output` is compared and not written.

        Raises LibraryMissing, ExportFailed, APIError or OSError.
        """
        options = export.Options(
            path,
            Path(output),
            form,
            base=None if base is None else str(base),
            leave_out_unembed=leave_out_unembed,
            dtype=dtype,
            limit=limit,
            prove=prove,
            check=check,
        )
        return export.export(self._session, options, progress)

    @wraps(export_checkpoint)
    async def export_checkpoint_async(self, *args: Any, **kwargs: Any) -> export.Exported:
        """Export a checkpoint in a thread; see `export_checkpoint`."""
        return await asyncio.to_thread(self.export_checkpoint, *args, **kwargs)

    export_checkpoint_async.__name__ = "export_checkpoint_async"

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> Future[str]:
        """Copy a checkpoint to this session and return the new path. The copy's run cannot be trained.

        Both copies share the stored bytes. `weights_access_token` is as for `create_training_client_from_state`.
        """

        async def copy() -> str:
            session_id, seq_id = await self._session.reserve_run()
            request = CopyWeightsRequest(
                source_path=path,
                session_id=session_id,
                model_seq_id=seq_id,
                ttl_seconds=ttl_seconds,
                weights_access_token=weights_access_token,
            )
            return (await self._transport.post("copy_weights", request, reader(CopyWeightsResponse))).tinker_path

        copied = self._loop.start(copy())
        return Future(copied, copied, what=f"a copy of {path}")

    copy_weights_async = submitted(copy_weights)

    def interpolate_checkpoints(
        self, source_paths: Sequence[str], coefficients: Sequence[float], output_path: str | None = None
    ) -> Future[InterpolateResponse]:
        """Create sampler weights whose change of the base model is exactly `sum coefficient * change`.

        `output_path` is the plain name of the new weights; the result contains their path. See
        docs/guide/reverse-kl.md.
        """
        request = InterpolateRequest(
            source_paths=list(source_paths), coefficients=list(coefficients), output_path=output_path
        )
        return checkpoints.interpolate(self._loop, self._transport, request)

    interpolate_checkpoints_async = submitted(interpolate_checkpoints)

    def close(self, status: FinishReasonType = "success", detail: str | None = None) -> Future[None]:
        """Finish the session and end the client's thread. Results not fetched yet are lost.

        Blocks until closed, so the returned future is already done. `detail` is shown to the operator with the session.
        """

        async def finish() -> None:
            await self._session.finish(status, detail)
            await self._transport.close()

        self._loop.close(finish)
        closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        closed.set_result(None)
        return Future(closed, closed)

    @override
    def __repr__(self) -> str:
        return f"<ServiceClient of {self._connection!r}, {self._session!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        self.close("success" if error_class is None else "errored")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self.close, "success" if error_class is None else "errored")

    async def _load_run(self, path: str, **fields: Any) -> TrainingClient:
        session_id, seq_id = await self._session.reserve_run()
        request = CreateFromWeightsRequest(session_id=session_id, model_seq_id=seq_id, path=path, **fields)
        made = await post_and_wait(self._transport, "load_weights", request, NewRun)
        info = GetInfoRequest(model_id=made.model_id)
        found = await self._transport.post("get_info", info, reader(GetInfoResponse))
        if found.model_data.model_name is None:
            raise MalformedMessage("get_info did not name a base model")
        return self._client_of(made, found.model_data.model_name)

    def _client_of(self, run: NewRun, base_model: str) -> TrainingClient:
        return TrainingClient(self._session, run.model_id, base_model)
