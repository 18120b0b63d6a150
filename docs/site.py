"""Build hooks of the documentation site: reference pages from the code, and links out of `docs/`.

`make docs` runs them (mkdocs.yml, `hooks`). The generated pages are not in the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("client", "scheduler", "server", "workers")

Json = Mapping[str, Any]

#: Sections of the page on the Python client, and the names that each describes.
CLIENT = {
    "Clients": ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient"),
    "Futures and retries": ("Future", "RetryPolicy"),
    "Data": ("ModelInput", "Datum", "TensorData", "AdamParams", "SamplingParams", "LoraConfig"),
    "Results": ("ForwardBackwardOutput", "OptimStepResponse", "SampleResponse", "SampledSequence"),
    "Records": ("TrainingRun", "Checkpoint"),
}
#: Kinds of a link or of a picture: `[text](target)`.
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
MERMAID = re.compile(r"^```mermaid$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated reference pages."""
    # MkDocs restores it after its import
    sys.path[:0] = [str(ROOT), *(str(ROOT / package) for package in PACKAGES)]
    from docs.modules import modules_page

    for path, content in {
        "reference/python-client.md": client_page(),
        "reference/openapi.md": http_page(openapi()),
        "reference/commands.md": commands_page(),
        "develop/modules.md": modules_page(),
    }.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write links to files of the repository as text, and diagrams as their source.

    Material loads its diagram library from a foreign host, so diagrams stay text here.
    """
    del config, files
    here = ROOT / "docs" / page.file.src_uri

    def without_repository_links(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        path = target.partition("#")[0]
        if mark or not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        file = (here.parent / path).resolve()
        return link[0] if file.is_relative_to(ROOT / "docs") else text

    return MERMAID.sub("```text", LINK.sub(without_repository_links, markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Add the table of contents for language models, and the pages in Markdown."""
    from docs.llms import write

    write(config.nav or [], Path(config.site_dir))


def client_page() -> str:
    """Return the page on the Python client: directives that mkdocstrings replaces."""
    lines = ["# Python client", "", "::: cotrain", "    options:", "      members: false", ""]
    for section, names in CLIENT.items():
        lines += [f"## {section}", "", *(f"::: cotrain.{name}\n" for name in names)]
    lines += ["## Errors", "", "::: cotrain.errors", ""]
    return "\n".join(lines)


def openapi() -> Json:
    """Return the OpenAPI document of the API."""
    from cotrain_server.app import create_app
    from cotrain_server.settings import ServerSettings

    settings = ServerSettings(redis_url="unix:///unused", data_dir="/unused")  # type: ignore[arg-type]
    return create_app(settings).openapi()


def http_page(document: Json) -> str:
    """Return the page of all operations: one section for each tag, one part for each operation."""
    lines = [
        "# HTTP operations",
        "",
        "Every operation of the server, from its OpenAPI document. A running server answers `GET /openapi.json`.",
        "",
    ]
    tags: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            part = list(_operation(document, f"{method.upper()} {path}", operation))
            tags.setdefault(operation.get("tags", ["other"])[0], []).extend(part)
    for tag, parts in tags.items():
        lines += [f"## {tag.capitalize()}", "", *parts]
    return "\n".join(lines)


def _operation(document: Json, name: str, operation: Json) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield operation.get("description", operation["summary"])
    yield ""
    rows = [(p["name"], p["in"], p["schema"], p.get("required", False)) for p in operation.get("parameters", ())]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(document, content.get("schema", {}))
        required = schema.get("required", ())
        for field, each in schema.get("properties", {}).items():
            rows.append((field, kind.rpartition("/")[2], each, field in required))
    if rows:
        yield "| field | in | type | |"
        yield "|---|---|---|---|"
        for field, where, schema, is_required in rows:
            about = " ".join(schema.get("description", "").split()).replace("|", "\\|")
            note = "required" if is_required else _default(schema)
            cells = (f"`{field}`", where, _type(document, schema), ". ".join(filter(None, (note, about))))
            yield f"| {' | '.join(cells)} |"
        yield ""
    for code, answer in operation["responses"].items():
        if code.startswith("2"):
            schemas = [each.get("schema", {}) for each in answer.get("content", {}).values()]
            fields = [_fields(_resolved(document, schema)) for schema in schemas]
            yield f"Answer {code}: {', '.join(filter(None, fields)) or 'no fields'}."
            yield ""


def _resolved(document: Json, schema: Json) -> Json:
    if "$ref" not in schema:
        return schema
    found: Json = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _fields(schema: Json) -> str:
    return ", ".join(f"`{name}`" for name in schema.get("properties", {}))


def _default(schema: Json) -> str:
    return f"default `{schema['default']}`" if schema.get("default") not in (None, "") else ""


def _type(document: Json, schema: Json) -> str:
    schema = _resolved(document, schema)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(document, each) for each in options))
    if schema.get("type") == "array":
        return f"list of {_type(document, schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def commands_page() -> str:
    """Return the page with the `--help` of every command, as tables."""
    from importlib.metadata import entry_points

    from cotrain.cli import COMMANDS, command_line

    root = typer.main.get_command(command_line(entry_points(group=COMMANDS)))
    return "\n".join(["# Commands", "", *_command(root, ("cotrain",))])


def _command(command: click.Command, words: Sequence[str]) -> Iterator[str]:
    context = click.Context(command, info_name=words[-1])
    yield f"{'#' * min(len(words) + 1, 4)} `{' '.join(words)}`"
    yield ""
    yield re.sub(r"\[/?[a-z]+\]", "", command.help or "").replace("\b", "")
    yield ""
    if not isinstance(command, click.Group):
        yield f"```sh\n{' '.join([*words, *command.collect_usage_pieces(context)])}\n```"
        yield ""
    rows = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if rows:
        yield "| option | |"
        yield "|---|---|"
        for each in rows:
            names = ", ".join(f"`{name}`" for name in each.opts) or f"`{each.name}`"
            about = " ".join((getattr(each, "help", None) or "").split()).replace("|", "\\|")
            yield f"| {names} | {about} |"
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from _command(inner, (*words, name))
