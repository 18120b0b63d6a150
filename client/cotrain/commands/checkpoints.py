"""Commands on checkpoints: `cotrain checkpoints …`, and `download`, `export` and `upload` of their files."""

import json
import re
import tarfile
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.filesize import decimal
from rich.table import Table

from cotrain.clients.export import Dtype, Form
from cotrain.clients.rest import RestClient
from cotrain.clients.retention import rules_of, superfluous
from cotrain.clients.service import ServiceClient
from cotrain.commands.terminal import (
    AsJson,
    PathOf,
    examples,
    opened,
    print_json,
    print_result,
    stages,
    table,
    transfer,
)
from cotrain.errors import CotrainError
from cotrain.export.adapter import CONFIG
from cotrain.wire.checkpoints import ParsedCheckpointTinkerPath
from cotrain.wire.rest import Checkpoint

_PATH = "tinker://1f2e3d4c:train:0/weights/final"
_SECONDS_BY_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(
    help="List, show, publish, keep and delete checkpoints; see also download and upload.", no_args_is_help=True
)


@app.command("list", epilog=examples("cotrain checkpoints list --run 1f2e3d4c:train:0"))
def list_checkpoints(
    run: Annotated[str | None, typer.Option(help="Only checkpoints of this run.")] = None, as_json: AsJson = False
) -> None:
    """List checkpoints, newest first."""
    with opened() as service:
        if run is None:
            checkpoints = service.list_checkpoints()
        else:
            checkpoints = service.create_rest_client().list_checkpoints(run).result().checkpoints
    print_result(checkpoints, _table(checkpoints), as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints show {_PATH}"))
def show(path: PathOf, as_json: AsJson = False) -> None:
    """Show one checkpoint, and the settings that a run needs to load it."""
    with opened() as service:
        rest = service.create_rest_client()
        info = rest.get_weights_info_by_tinker_path(path).result()
        checkpoint = _find(rest, path)
    parts = {"attn": info.train_attn, "mlp": info.train_mlp, "unembed": info.train_unembed}
    trained = ", ".join(name for name, is_trained in parts.items() if is_trained)
    print_result(
        {**checkpoint.model_dump(), **info.model_dump()},
        _table([checkpoint]),
        f"base model {info.base_model}, rank {info.lora_rank}, trains {trained}",
        as_json=as_json,
    )


@app.command(epilog=examples(f"cotrain checkpoints publish {_PATH}"))
def publish(path: PathOf, as_json: AsJson = False) -> None:
    """Publish a checkpoint: every tenant of the server may read it."""
    with opened() as service:
        service.create_rest_client().publish_checkpoint_from_tinker_path(path).result()
    print_result({"tinker_path": path, "public": True}, f"published {path}", as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints unpublish {_PATH}"))
def unpublish(path: PathOf, as_json: AsJson = False) -> None:
    """Make a published checkpoint private again."""
    with opened() as service:
        service.create_rest_client().unpublish_checkpoint_from_tinker_path(path).result()
    print_result({"tinker_path": path, "public": False}, f"unpublished {path}", as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints ttl {_PATH} 7d", f"cotrain checkpoints ttl {_PATH} never"))
def ttl(
    path: PathOf,
    after: Annotated[str, typer.Argument(metavar="TIME", help="Seconds, or 90m, 12h, 7d; or never.")],
    as_json: AsJson = False,
) -> None:
    """Set the time until a checkpoint expires, or `never`."""
    seconds = _seconds(after)
    with opened() as service:
        service.create_rest_client().set_checkpoint_ttl_from_tinker_path(path, seconds).result()
    message = f"{path} is kept" if seconds is None else f"{path} expires in {after}{' s' * after.isdigit()}"
    print_result({"tinker_path": path, "ttl_seconds": seconds}, message, as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints delete {_PATH}"))
def delete(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="tinker://<run>/<kind>/<name>")],
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints; runs loaded from them keep their weights."""
    with opened() as service:
        for path in paths:
            service.delete_checkpoint(path)
            if not as_json:
                typer.echo(f"deleted {path}")
    if as_json:
        print_json([{"tinker_path": path, "deleted": True} for path in paths])


@app.command(
    epilog=examples(
        "cotrain checkpoints prune --keep 'last:3, best:eval/nll:2' --dry-run",
        "cotrain checkpoints prune --run 1f2e3d4c:train:0 --keep last:1",
    )
)
def prune(
    keep: Annotated[
        str,
        typer.Option(
            help="last:N keeps the newest, best:METRIC:N the lowest values, highest:METRIC:N the highest; "
            "separated by commas."
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Only this run; otherwise each run alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the training checkpoints that a rule does not keep, in each run.

    The newest checkpoint of a run, published ones, and those with an expiry are always kept.
    """
    with opened() as service:
        rules = rules_of(keep)
        by_run: dict[str, list[Checkpoint]] = {}
        for each in service.list_checkpoints():
            owner = ParsedCheckpointTinkerPath.from_tinker_path(each.tinker_path).training_run_id
            if run in (None, owner):
                by_run.setdefault(owner, []).append(each)
        doomed = [each for found in by_run.values() for each in superfluous(found, rules)]
        if not dry_run:
            service.delete_checkpoints([each.tinker_path for each in doomed])
    size = decimal(sum(each.size_bytes or 0 for each in doomed))
    print_result(
        [{"tinker_path": each.tinker_path, "deleted": not dry_run} for each in doomed],
        _table(doomed),
        f"{'would delete' if dry_run else 'deleted'} {len(doomed)} checkpoints, {size}",
        as_json=as_json,
    )


def download(
    path: PathOf,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write its files to.")] = Path(),
    archive: Annotated[Path | None, typer.Option(help="Write one tar with all its files here instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint's adapter to a folder that plain PEFT, vLLM and merge tools read.

    An interrupted download resumes where it stopped.
    """
    with opened() as service, transfer(path.rpartition("/")[2], shown=not as_json) as progress:
        if archive is None:
            files = service.download_checkpoint(path, output, progress)
        else:
            service.download_checkpoint_archive(path, archive, progress)
            output, files = archive.parent, [archive.name]
        _warn_of_merge(service, _config_of(output, archive))
    if as_json:
        print_json({"tinker_path": path, "folder": output, "files": files})
    else:
        typer.echo(archive or output)


def export(
    path: PathOf,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to create; it must be missing or empty.")],
    merged: Annotated[bool, typer.Option("--merged", help="A whole model: base model plus adapter.")] = False,
    peft: Annotated[bool, typer.Option("--peft", help="An adapter for PEFT.")] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="An adapter, merged where vLLM refuses it (LoRA on lm_head).")
    ] = False,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="An adapter for the merge of tinker_cookbook.weights.")
    ] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="A LoRA adapter for llama.cpp.")] = False,
    base: Annotated[
        str | None, typer.Option(help="The base model's folder, or its name on the hub. Default: its name.")
    ] = None,
    leave_out_unembed: Annotated[bool, typer.Option("--leave-out-unembed", help="Drop the LoRA of lm_head.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Type of merged weights: bfloat16, float16, float32. Default: the base's.")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest difference of a log-prob from the server's, in nats. Default: 0.001 for "
            "float32 weights, otherwise 0.25.",
        ),
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="URL of a vLLM server that loads the result and is compared too.")
    ] = None,
    prove: Annotated[bool, typer.Option("--prove/--no-prove", help="Compare log-probs with the server's.")] = True,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint for other programs, and compare its log-probs with the server's."""
    flags = {"merged": merged, "peft": peft, "vllm": vllm, "tinker": tinker, "gguf": gguf}
    forms = [name for name, is_given in flags.items() if is_given]
    if len(forms) != 1:
        raise typer.BadParameter("give one of --merged, --peft, --vllm, --tinker, --gguf")
    with opened() as service, stages(shown=not as_json) as progress:
        done = service.export_checkpoint(
            path,
            output,
            cast(Form, forms[0]),
            base=base,
            leave_out_unembed=leave_out_unembed,
            dtype=cast(Dtype | None, dtype),
            limit=limit,
            check=check,
            prove=prove,
            progress=progress,
        )
    for note in done.notes:
        typer.echo(note, err=True)
    if as_json:
        names = ("files", "kind", "notes", "proof", "checked")
        about = {name: getattr(done, name) for name in names}
        print_json({"tinker_path": path, "folder": output, **about})
    else:
        typer.echo(output)


def upload(
    source: Annotated[Path, typer.Argument(help="A PEFT folder, or a tar of one.", exists=True)],
    base_model: Annotated[str, typer.Option(help="The base model it was trained on.")],
    name: Annotated[str, typer.Option(help="Name of the checkpoint.")],
    ttl_seconds: Annotated[int | None, typer.Option(min=1, help="Seconds until it expires; by default never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a LoRA adapter trained elsewhere: safetensors, in the format of PEFT."""
    with opened() as service, transfer(source.name, shown=not as_json) as progress:
        path = service.upload_checkpoint(source, base_model, name, ttl_seconds=ttl_seconds, progress=progress)
    print_result({"tinker_path": path}, path, as_json=as_json)


def _seconds(text: str) -> int | None:
    """Return the seconds of `3600`, `90m`, `12h` or `7d`, and None for `never`."""
    if text == "never":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,11})([smhd]?)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is none of 3600, 90m, 12h, 7d, never")
    return int(match[1]) * _SECONDS_BY_UNIT[match[2]]


def _find(rest: RestClient, path: str) -> Checkpoint:
    run = ParsedCheckpointTinkerPath.from_tinker_path(path).training_run_id
    for checkpoint in rest.list_checkpoints(run).result().checkpoints:
        if checkpoint.tinker_path == path:
            return checkpoint
    raise CotrainError(f"there is no checkpoint {path}")


def _table(checkpoints: list[Checkpoint]) -> Table:
    return table(
        ("path", "step", "size", "saved", "expires", "public", "metrics"),
        (
            (
                each.tinker_path,
                each.step,
                None if each.size_bytes is None else decimal(each.size_bytes),
                each.time,
                each.expires_at or "never",
                "yes" if each.public else "",
                ", ".join(f"{name} {value:.4g}" for name, value in (each.metrics or {}).items()),
            )
            for each in checkpoints
        ),
    )


def _warn_of_merge(service: ServiceClient, config: dict[str, Any]) -> None:
    """Warn about an adapter that PEFT would merge wrongly: of the unembedding, where embeddings are tied."""
    if "lm_head" not in config.get("target_modules", ()):
        return
    models = service.get_server_capabilities().supported_models
    base_model = config.get("base_model_name_or_path")
    tied = [each.tied_embeddings for each in models if each.model_name == base_model]
    if tied == [False]:
        return
    state = "are tied" if tied == [True] else "may be tied"
    typer.echo(
        f"This adapter changes the unembedding, and its base model's embeddings {state}: loaded with PEFT it "
        "is right, but merge_and_unload gives another model. Use `cotrain export --merged`.",
        err=True,
    )


def _config_of(folder: Path, archive: Path | None) -> dict[str, Any]:
    """Read PEFT's configuration from a download; {} from an encrypted one."""
    if archive is None:
        file = folder / CONFIG
        return dict(json.loads(file.read_bytes())) if file.exists() else {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if Path(member.name).name == CONFIG and (content := tar.extractfile(member)):
                return dict(json.loads(content.read()))
    return {}
