"""`cotrain runs note` and `cotrain runs tag`: what a run is remembered by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cotrain.commands.terminal import AsJson, harmless, opened, print_json

if TYPE_CHECKING:
    from cotrain.wire.rest import TrainingRun

Run = Annotated[str, typer.Argument(metavar="RUN", help="Its id.")]


def note(
    run: Run,
    text: Annotated[str, typer.Argument(help="Up to 2,000 characters; '' takes it away.")],
    as_json: AsJson = False,
) -> None:
    """Write a note to a run."""
    with opened() as service:
        _print(service.create_rest_client().update_training_run(run, note=text).result(), as_json)


def tag(
    run: Run,
    tags: Annotated[list[str] | None, typer.Argument(help="To add: up to 64 characters.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="To take away; repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Add tags to a run, and take others away; without any, show them."""
    with opened() as service:
        rest = service.create_rest_client()
        found = rest.get_training_run(run).result()
        kept = list(dict.fromkeys([*found.tags, *(tags or [])]))
        wanted = [each for each in kept if each not in (remove or [])]
        if wanted != found.tags:
            found = rest.update_training_run(run, tags=wanted).result()
    _print(found, as_json)


def _print(run: TrainingRun, as_json: bool) -> None:
    if as_json:
        print_json({"training_run_id": run.training_run_id, "note": run.note, "tags": run.tags})
        return
    typer.echo(f"{run.training_run_id}: {', '.join(map(harmless, run.tags)) or 'no tags'}")
    if run.note:
        typer.echo(harmless(run.note))
