"""Export of a checkpoint for other programs: download, conversion, and comparison with the server."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from cotrain.clients import checkpoints
from cotrain.clients.rest import RestClient
from cotrain.clients.session import Session
from cotrain.errors import ExportFailed
from cotrain.export import scores
from cotrain.export.adapter import Adapter, at_tinker, read_adapter, write_adapter
from cotrain.export.base import BaseFolder, find_base, library
from cotrain.export.formats import GGUF_FILE, card, refusal_of, unties, write_gguf, write_merged
from cotrain.requests.futures import Future
from cotrain.wire.checkpoints import ParsedCheckpointTinkerPath
from cotrain.wire.datums import ModelInput
from cotrain.wire.sampling import SamplingParams

Form = Literal["merged", "peft", "vllm", "tinker", "gguf"]
Dtype = Literal["bfloat16", "float16", "float32"]
Kind = Literal["merged", "adapter", "tinker", "gguf"]
"""Content of the folder: a whole model, a PEFT adapter, an adapter for the cookbook, or a GGUF adapter."""

#: Arguments: the stage, the amount done, and the total.
ExportProgress = Callable[[str, int, int], None]
#: Families whose classes in vLLM always use the embedding as the unembedding.
ALWAYS_TIED = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True)
class Options:
    """Arguments of an export; see `ServiceClient.export_checkpoint`."""

    path: str
    output: Path
    form: Form
    base: str | None = None
    leave_out_unembed: bool = False
    dtype: Dtype | None = None
    limit: float | None = None
    prove: bool = True
    check: str | None = None


@dataclass(frozen=True)
class Exported:
    """Finished export."""

    folder: Path
    files: list[str]
    kind: Kind
    notes: list[str]
    """Decisions and results, as sentences; also in the folder's README.md."""
    proof: scores.Proof | None
    """Comparison with the server's log-probs; None if it was turned off."""
    checked: scores.Proof | None
    """Comparison of the vLLM server's log-probs; None without `check`."""


@dataclass(frozen=True)
class _Plan:
    kind: Kind
    adapter: Adapter
    notes: list[str]


def plan_export(options: Options, base: BaseFolder, adapter: Adapter) -> _Plan:
    """Choose the content of the folder. Raises ExportFailed if the form cannot hold the adapter."""
    notes = []
    if options.leave_out_unembed and adapter.trains_unembedding:
        adapter = adapter.without_unembedding()
        notes.append("The LoRA of the unembedding (lm_head) is left out, as requested.")
        if not adapter.matrices:
            raise ExportFailed("--leave-out-unembed leaves nothing: only the unembedding is trained")
    kind: Kind = "adapter"
    if options.form == "gguf":
        kind = "gguf"
        if refused := refusal_of(base, adapter):
            raise ExportFailed(refused)
    elif options.form == "merged":
        kind = "merged"
    elif options.form == "vllm" and (adapter.trains_unembedding or adapter.trains_experts):
        if adapter.trains_unembedding and base.family in ALWAYS_TIED:
            raise ExportFailed(
                f"vLLM always ties the embeddings of {base.family}, so it cannot serve a trained "
                "unembedding: pass --leave-out-unembed, or train with train_unembed=False"
            )
        kind = "merged"
        what = "the unembedding (lm_head)" if adapter.trains_unembedding else "experts"
        notes.append(f"Merged, because most classes of vLLM refuse a LoRA of {what} in PEFT's form.")
    elif options.form == "tinker":
        kind = "tinker"
    if kind == "merged" and unties(base, adapter):
        notes.append(
            "The unembedding is a matrix of its own (tie_word_embeddings: false), because the adapter "
            "changes it and not the embedding."
        )
    if kind == "adapter" and unties(base, adapter):
        notes.append(
            "Do not merge this adapter with PEFT's merge_and_unload: embeddings are tied, and the result "
            "would differ. Export with --merged."
        )
    return _Plan(kind, adapter, notes)


def export(session: Session, options: Options, progress: ExportProgress) -> Exported:
    """Export a checkpoint. The folder appears complete, after the comparison with the server.

    With `check`, an existing export of the checkpoint is compared again and not written.

    Raises ExportFailed, LibraryMissing, APIError or OSError.
    """
    checks_only = _checks_only(options)
    connection = session.connection
    base_model = RestClient(connection).get_weights_info_by_tinker_path(options.path).result().base_model
    base = find_base(options.base or base_model)
    limit = options.limit if options.limit is not None else scores.limit_of(base, options.dtype)
    comparison = None
    output = options.output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as temporary:
        downloaded, folder = Path(temporary) / "adapter", Path(temporary) / "export"
        report = partial(progress, "download")
        connection.loop.run(checkpoints.download(connection.transport, options.path, downloaded, report))
        adapter = read_adapter(downloaded)
        plan = plan_export(options, base, adapter)
        if options.prove or options.check:
            comparison = _Comparison(session, options.path, base_model, base, limit, progress)
        if checks_only:
            folder = output
        else:
            folder.mkdir()
            _write(plan, base, downloaded, folder, options, progress)
        proof = None
        notes = list(plan.notes)
        if comparison:
            proof = comparison.prove(plan, adapter, downloaded, folder, notes)
            notes.append(f"Compared with the server: {proof.sentence()}.")
        if not checks_only:
            text = card(plan.kind, options.path, base, base_model, plan.adapter, notes)
            (folder / "README.md").write_text(text, encoding="utf-8")
            if output.exists():
                output.rmdir()
            folder.rename(output)
    checked = None
    if options.check and comparison:
        checked = comparison.check(options.check, output)
        notes.append(f"On vLLM: {checked.sentence()}.")
    files = sorted(file.name for file in output.iterdir())
    return Exported(options.output, files, plan.kind, notes, proof, checked)


class _Comparison:
    """Log-probs of the server for a few texts, and the comparisons with them."""

    def __init__(
        self, session: Session, path: str, base_model: str, base: BaseFolder, limit: float, progress: ExportProgress
    ) -> None:
        loop = session.connection.loop
        sampler = loop.run(session.create_sampler(model_path=path))
        prompts = scores.prompts(base.vocab_size)
        continued = [
            sampler.sample(
                ModelInput.from_ints(prompt), 1, SamplingParams(max_tokens=scores.SAMPLED_TOKENS, seed=number, stop=[])
            )
            for number, prompt in enumerate(prompts)
        ]
        self._texts = [
            prompt + future.result().sequences[0].tokens for prompt, future in zip(prompts, continued, strict=True)
        ]
        unadapted = loop.run(session.create_sampler(base_model=base_model))
        sent, sent_unadapted = (
            [client.compute_logprobs(ModelInput.from_ints(text)) for text in self._texts]
            for client in (sampler, unadapted)
        )
        self._expected: scores.Scores = _logprobs_of(sent)
        self._unadapted = _logprobs_of(sent_unadapted)
        self._base = base
        self._limit = limit
        self._report = partial(progress, "compare")

    def prove(self, plan: _Plan, adapter: Adapter, downloaded: Path, folder: Path, notes: list[str]) -> scores.Proof:
        """Compare the folder's model with the server's. Raises ExportFailed above the limit.

        A model without the unembedding's LoRA is compared with PEFT, and the whole adapter with the server.
        """
        if plan.adapter is not adapter:
            self._compare(self._by_peft(downloaded), "the downloaded adapter")
            write_adapter(plan.adapter, downloaded)
            left = self._by_peft(downloaded)
            effect = max(scores.distances(left, self._expected))
            notes.append(f"Without it, log-probs differ from the server's by up to {effect:.2g} nats.")
            self._expected = left
        if plan.kind == "merged":
            found = scores.score_merged(folder, self._texts, self._report)
        else:
            found = self._by_peft(folder if plan.kind == "adapter" else downloaded)
        return self._compare(found, "the export")

    def check(self, url: str, folder: Path) -> scores.Proof:
        """Compare the log-probs of a vLLM server. Raises ExportFailed above the limit; the folder stays."""
        limit = max(self._limit, scores.limit_of(self._base, "bfloat16"))
        found = scores.score_on_vllm(url, folder, self._texts)
        return scores.compare(found, self._expected, self._unadapted, limit, f"the model at {url}")

    def _compare(self, found: scores.Scores, what: str) -> scores.Proof:
        return scores.compare(found, self._expected, self._unadapted, self._limit, what)

    def _by_peft(self, folder: Path) -> scores.Scores:
        return scores.score_peft(self._base, folder, self._texts, self._report)


def _logprobs_of(futures: Sequence[Future[list[float | None]]]) -> list[list[float]]:
    """Wait for the log-probs of every token but the first, for each text."""
    return [[each for each in future.result()[1:] if each is not None] for future in futures]


def _checks_only(options: Options) -> bool:
    """Return True if the export exists and is only checked.

    Raises ExportFailed or LibraryMissing before anything is transferred.
    """
    if options.form not in get_args(Form):
        raise ExportFailed(f"form is one of {', '.join(get_args(Form))}, not {options.form!r}")
    if options.dtype is not None and options.dtype not in get_args(Dtype):
        raise ExportFailed(f"dtype is one of {', '.join(get_args(Dtype))}, not {options.dtype!r}")
    if options.dtype is not None and options.form not in ("merged", "vllm"):
        raise ExportFailed("dtype is of merged weights; an adapter's are float32")
    ParsedCheckpointTinkerPath.from_tinker_path(options.path)
    if options.check and options.form == "gguf":
        raise ExportFailed("--check loads a model on a vLLM server, which reads no GGUF adapter")
    readme = options.output / "README.md"
    checks_only = bool(options.check and readme.is_file() and f"`{options.path}`" in readme.read_text("utf-8"))
    is_free = not options.output.exists() or (options.output.is_dir() and not any(options.output.iterdir()))
    if not (is_free or checks_only):
        raise ExportFailed(f"output: {options.output} exists and is not an empty folder")
    needed = ["torch", "safetensors", "transformers"]
    needed += ["gguf"] if options.form == "gguf" else []
    needed += ["peft"] if options.form != "merged" or options.leave_out_unembed else []
    for name in needed:
        library(name)
    return checks_only


def _write(
    plan: _Plan, base: BaseFolder, downloaded: Path, folder: Path, options: Options, progress: ExportProgress
) -> None:
    if plan.kind == "merged":
        write_merged(base, plan.adapter, folder, options.dtype, partial(progress, "merge"))
    elif plan.kind == "tinker":
        interleaved = base.family == "gpt_oss"
        write_adapter(at_tinker(plan.adapter, interleaved=interleaved), folder)
    elif plan.kind == "gguf":
        write_gguf(base, plan.adapter, folder / GGUF_FILE, options.path.rpartition("/")[2])
    elif options.leave_out_unembed:
        write_adapter(plan.adapter, folder)
    else:
        for file in downloaded.iterdir():
            shutil.copyfile(file, folder / file.name)


def report_nothing(stage: str, done: int, total: int) -> None:
    """Ignore the progress."""
