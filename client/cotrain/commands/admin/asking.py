"""Requests to the admin API: server address, admin key, and errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cotrain.commands.terminal import checked, failing_in_a_sentence, kept_admin_key, plain_http
from cotrain.errors import NotFoundError
from cotrain.settings import ClientSettings, checked_url

AdminKey = Annotated[str, typer.Option(envvar="COTRAIN_ADMIN_KEY", help="The operator's key.")]


@dataclass(frozen=True)
class Server:
    """Options of `cotrain admin` before its subcommand."""

    base_url: str
    admin_key: str
    data_dir: Path


def ask(
    context: typer.Context,
    method: str,
    *path: str,
    json: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    below: str = "admin/",
) -> Any:
    """Request a path below /api/v1/ and return the JSON of the response, or None if it is empty.

    An error ends the command with one sentence.
    """
    server: Server = context.obj
    with failing_in_a_sentence():
        url = checked_url(server.base_url)
        key = server.admin_key or kept_admin_key(url, server.data_dir)
        if not key:
            raise ValueError(
                "The admin key is needed: COTRAIN_ADMIN_KEY, or on the server's host its data folder (--data-dir)."
            )
        where = "/".join(quote(part, safe="") for part in path)
        asked = {name: value for name, value in (params or {}).items() if value is not None}
        with plain_http(ClientSettings(url, key)) as http:
            answer = http.request(method, f"/api/v1/{below}{where}", json=json, params=asked)
        try:
            checked(answer)
        except NotFoundError as error:
            if answer.json().get("code") in ("operators_only", "not_found"):
                raise ValueError(f"{url} does not take this admin key.") from error
            raise
        return answer.json() if answer.content else None
