"""Commands `cotrain checkpoints …`: list, publish, expire and delete checkpoints."""

import re
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table

from cotrain.clients.rest import RestClient
from cotrain.clients.retention import rules_of, superfluous
from cotrain.commands.terminal import AsJson, PathOf, examples, opened, print_json, print_result, table
from cotrain.errors import CotrainError
from cotrain.wire.checkpoints import ParsedCheckpointTinkerPath
from cotrain.wire.rest import Checkpoint

PATH = "tinker://1f2e3d4c:train:0/weights/final"
SECONDS_BY_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(
    help="List, show, publish, keep and delete checkpoints; see also download and upload.", no_args_is_help=True
)


def _seconds(text: str) -> int | None:
    """Return the seconds of `3600`, `90m`, `12h` or `7d`, and None for `never`."""
    if text == "never":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,11})([smhd]?)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is none of 3600, 90m, 12h, 7d, never")
    return int(match[1]) * SECONDS_BY_UNIT[match[2]]


@app.command("list", epilog=examples("cotrain checkpoints list --run 1f2e3d4c:train:0"))
def list_checkpoints(
    run: Annotated[str | None, typer.Option(help="Only those of this run.")] = None, as_json: AsJson = False
) -> None:
    """List checkpoints, newest first."""
    with opened() as service:
        if run is None:
            checkpoints = service.list_checkpoints()
        else:
            checkpoints = service.create_rest_client().list_checkpoints(run).result().checkpoints
    print_result(checkpoints, _table(checkpoints), as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints show {PATH}"))
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


@app.command(epilog=examples(f"cotrain checkpoints publish {PATH}"))
def publish(path: PathOf, as_json: AsJson = False) -> None:
    """Publish a checkpoint: every tenant of the server may read it."""
    with opened() as service:
        service.create_rest_client().publish_checkpoint_from_tinker_path(path).result()
    print_result({"tinker_path": path, "public": True}, f"published {path}", as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints unpublish {PATH}"))
def unpublish(path: PathOf, as_json: AsJson = False) -> None:
    """Make a published checkpoint private again."""
    with opened() as service:
        service.create_rest_client().unpublish_checkpoint_from_tinker_path(path).result()
    print_result({"tinker_path": path, "public": False}, f"unpublished {path}", as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints ttl {PATH} 7d", f"cotrain checkpoints ttl {PATH} never"))
def ttl(
    path: PathOf,
    after: Annotated[str, typer.Argument(metavar="TIME", help="Seconds, or 90m, 12h, 7d; or never.")],
    as_json: AsJson = False,
) -> None:
    """Set the time until a checkpoint expires, or `never`."""
    seconds = _seconds(after)
    with opened() as service:
        service.create_rest_client().set_checkpoint_ttl_from_tinker_path(path, seconds).result()
    message = f"{path} is kept" if seconds is None else f"{path} expires in {after}"
    print_result({"tinker_path": path, "ttl_seconds": seconds}, message, as_json=as_json)


@app.command(epilog=examples(f"cotrain checkpoints delete {PATH}"))
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
