"""`cotrain models`: the base models of the server."""

from __future__ import annotations

from rich.table import Table

from cotrain.commands.terminal import AsJson, opened, print_json, print_rich


def models(as_json: AsJson = False) -> None:
    """List the base models that the server holds."""
    with opened() as service:
        found = service.get_server_capabilities().supported_models
    if as_json:
        print_json(found)
        return
    table = Table("model", "context", "train", "sample", box=None)
    for model in found:
        table.add_row(
            model.model_name,
            f"{model.max_context_length:,}" if model.max_context_length else "",
            _yes(model.trainable),
            _yes(model.sampleable),
        )
    print_rich(table)


def _yes(can: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[can]
