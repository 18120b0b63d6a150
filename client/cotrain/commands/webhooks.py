"""Commands `cotrain webhooks …`: delivery of an account's events to a URL."""

from typing import Annotated

import typer

from cotrain.commands.terminal import AsJson, examples, facts, minute, opened, print_result

app = typer.Typer(help="Be notified when a run ends, fails or drifts, or a checkpoint is saved.", no_args_is_help=True)


@app.command(
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
    print_result(made, made.secret, as_json=as_json)
    if not as_json:
        typer.echo("kept by the server and shown once: verify each event with it", err=True)


@app.command(epilog=examples("cotrain webhooks show --json"))
def show(as_json: AsJson = False) -> None:
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


@app.command("test", epilog=examples("cotrain webhooks test && cotrain webhooks show"))
def send_test(as_json: AsJson = False) -> None:
    """Send an event of type `test`; `show` prints the outcome."""
    with opened() as service:
        sent = service.create_rest_client().test_webhook().result()
    print_result(sent, sent.event_id, as_json=as_json)


@app.command(epilog=examples("cotrain webhooks remove"))
def remove(as_json: AsJson = False) -> None:
    """Remove the webhook; pending events are dropped."""
    with opened() as service:
        service.create_rest_client().remove_webhook().result()
    print_result({"removed": True}, "removed", as_json=as_json)
