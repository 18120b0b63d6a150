"""Commands on runs, `cotrain runs …` and `why`, on their base models, `models`, and on their events, `webhooks …`."""

from typing import Annotated

import typer
from rich.table import Table

from cotrain.commands.history import export, history
from cotrain.commands.terminal import AsJson, examples, facts, minute, opened, print_result, table
from cotrain.wire.rest import MAX_PAGE, TrainingRun

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]

app = typer.Typer(help="List, show and end your runs.", no_args_is_help=True)
webhooks_app = typer.Typer(
    help="Be notified when a run ends, fails or drifts, or a checkpoint is saved.", no_args_is_help=True
)


@app.command("list", epilog=examples("cotrain runs list --limit 100", "cotrain runs list --json | jq length"))
def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="Maximum number of runs.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Number of runs to skip.")] = 0,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only runs with this tag; if repeated, with all of them.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Only runs with these words in note or tags.")] = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with opened() as service:
        rest = service.create_rest_client()
        page = rest.list_training_runs(limit, offset, tags=tag or (), text=text).result()
    remaining = page.cursor.total_count - offset - len(page.training_runs)
    hint = f"{remaining} more: --limit, --offset" if remaining > 0 else ""
    print_result(page.training_runs, _table(page.training_runs), as_json=as_json, hint=hint)


@app.command(epilog=examples("cotrain runs show 1f2e3d4c:train:0"))
def show(
    run: Annotated[str, typer.Argument(help="Id of the run, or path of one of its checkpoints.")],
    as_json: AsJson = False,
) -> None:
    """Show one run and its checkpoints."""
    with opened() as service:
        rest = service.create_rest_client()
        is_path = run.startswith("tinker://")
        get = rest.get_training_run_by_tinker_path if is_path else rest.get_training_run
        found = get(run).result()
        checkpoints = rest.list_checkpoints(found.training_run_id).result().checkpoints
    rows = facts(*_facts(found), *(("checkpoint", each.tinker_path) for each in checkpoints))
    print_result({**found.model_dump(), "checkpoints": checkpoints}, rows, as_json=as_json)


@app.command(
    epilog=examples(
        "cotrain runs note 1f2e3d4c:train:0 'the one with the longer warm-up'", "cotrain runs list --text warm-up"
    )
)
def note(
    run: Run,
    text: Annotated[str, typer.Argument(help="Up to 2,000 characters; '' removes it.")],
    as_json: AsJson = False,
) -> None:
    """Write a note to a run."""
    with opened() as service:
        _print_labels(service.create_rest_client().update_training_run(run, note=text).result(), as_json)


@app.command(
    epilog=examples(
        "cotrain runs tag 1f2e3d4c:train:0 baseline paper --remove draft", "cotrain runs list --tag baseline"
    )
)
def tag(
    run: Run,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add, of up to 64 characters.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Tag to remove; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Add and remove tags of a run; without any, show its tags."""
    with opened() as service:
        rest = service.create_rest_client()
        found = rest.get_training_run(run).result()
        both = list(dict.fromkeys([*found.tags, *(tags or [])]))
        new_tags = [each for each in both if each not in (remove or [])]
        if new_tags != found.tags:
            found = rest.update_training_run(run, tags=new_tags).result()
    _print_labels(found, as_json)


@app.command(epilog=examples("cotrain runs end 1f2e3d4c:train:0"))
def end(run: Run, as_json: AsJson = False) -> None:
    """End a run, which frees its place. Waiting requests fail, checkpoints remain, and it cannot continue."""
    with opened() as service:
        service.create_rest_client().end_training_run(run).result()
    print_result({"training_run_id": run, "ended": True}, f"Run {run} has ended.", as_json=as_json)


app.command(
    epilog=examples(
        "cotrain runs history 1f2e3d4c:train:0 --last 20", "cotrain runs history 1f2e3d4c:train:0 --csv > history.csv"
    )
)(history)
app.command(
    epilog=examples(
        "cotrain runs export 1f2e3d4c:train:0 1f2e3d4c:train:1 --to tensorboard --output runs/",
        "tensorboard --logdir runs/",
    )
)(export)


def why(run: Run, as_json: AsJson = False) -> None:
    """Show the cause for which a run waits, in one sentence."""
    with opened() as service:
        found = service.create_rest_client().get_wait_reason(run).result()
    print_result(found, found.reason, as_json=as_json)


def models(as_json: AsJson = False) -> None:
    """List the base models of the server."""
    with opened() as service:
        found = service.get_server_capabilities().supported_models
    rows = (
        (
            model.model_name,
            f"{model.max_context_length:,}" if model.max_context_length else None,
            _yes_or_no(model.trainable),
            _yes_or_no(model.sampleable),
        )
        for model in found
    )
    print_result(found, table(("model", "context", "train", "sample"), rows), as_json=as_json)


@webhooks_app.command(
    "set",
    epilog=examples(
        "cotrain webhooks set https://example.com/hooks/cotrain",
        "cotrain webhooks set https://example.com/hooks/cotrain --drift-above 0.2",
    ),
)
def set_webhook(
    url: Annotated[str, typer.Argument(metavar="URL", help="https://…")],
    drift_above: Annotated[
        float | None, typer.Option(metavar="NATS", help="Send run.drift above this mean rollout gap of a pass.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send events to this URL. Prints the signing secret, which is shown only once."""
    with opened() as service:
        made = service.create_rest_client().set_webhook(url, drift_above).result()
    hint = "kept by the server and shown once: verify each event with it"
    print_result(made, made.secret, as_json=as_json, hint=hint)


@webhooks_app.command("show", epilog=examples("cotrain webhooks show --json"))
def show_webhook(as_json: AsJson = False) -> None:
    """Show the URL of the webhook, and the state of its deliveries."""
    with opened() as service:
        found = service.create_rest_client().get_webhook().result()
    rows: list[tuple[str, object]] = [("url", found.url), ("since", found.created_at)]
    if found.drift_above is not None:
        rows.append(("drift above", f"{found.drift_above:g} nats"))
    for name in ("waiting", "delivered", "retried", "given_up", "dropped"):
        rows.append((name.replace("_", " "), getattr(found, name)))
    if found.last_outcome:
        at = f" ({minute(found.last_at)})" if found.last_at else ""
        rows.append(("last", f"{found.last_outcome}: {found.last_answer}{at}"))
    print_result(found, facts(*rows), as_json=as_json)


@webhooks_app.command("test", epilog=examples("cotrain webhooks test && cotrain webhooks show"))
def send_test(as_json: AsJson = False) -> None:
    """Send an event of type `test`; `show` prints the outcome."""
    with opened() as service:
        sent = service.create_rest_client().test_webhook().result()
    print_result(sent, sent.event_id, as_json=as_json)


@webhooks_app.command("remove", epilog=examples("cotrain webhooks remove"))
def remove_webhook(as_json: AsJson = False) -> None:
    """Remove the webhook; pending events are dropped."""
    with opened() as service:
        service.create_rest_client().remove_webhook().result()
    print_result({"removed": True}, "removed", as_json=as_json)


def _print_labels(run: TrainingRun, as_json: bool) -> None:
    print_result(
        {"training_run_id": run.training_run_id, "note": run.note, "tags": run.tags},
        f"{run.training_run_id}: {', '.join(run.tags) or 'no tags'}",
        *([run.note] if run.note else []),
        as_json=as_json,
    )


def _table(runs: list[TrainingRun]) -> Table:
    return table(
        (
            *("run", "base model", "rank", "state", "steps", "last loss", "failed"),
            *("last request", "newest checkpoint", "tags"),
        ),
        (
            (
                run.training_run_id,
                run.base_model,
                run.lora_rank,
                run.state,
                run.steps,
                None if run.last_loss is None else f"{run.last_loss:.4g}",
                run.failed_requests,
                run.last_request_time,
                run.last_checkpoint.checkpoint_id if run.last_checkpoint else None,
                ", ".join(run.tags),
            )
            for run in runs
        ),
    )


def _facts(run: TrainingRun) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("run", run.training_run_id),
        ("base model", run.base_model),
        ("rank", run.lora_rank),
        ("state", run.state),
        ("steps", run.steps),
        ("last loss", None if run.last_loss is None else f"{run.last_loss:.4g} nats per token"),
        ("failed requests", run.failed_requests),
        ("last request", run.last_request_time),
        *((f"metadata {name}", value) for name, value in (run.user_metadata or {}).items()),
    ]
    rewind, stopped = run.rewind_from, "its recovery did not reproduce the stored results"
    more = {
        "note": run.note,
        "tags": ", ".join(run.tags),
        "can rewind to": "" if rewind is None else f"step {rewind} or later",
        "waiting": (run.waiting or "").removeprefix("waiting "),
        "stopped": stopped if run.corrupted else "",
        "rolled back to": run.rolled_back_to,
    }
    return rows + [(name, value) for name, value in more.items() if value]


def _yes_or_no(can: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[can]
