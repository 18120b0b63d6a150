"""`cotrain download` and `cotrain upload`: checkpoints to files, and files to checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from cotrain.commands.terminal import AsJson, PathOf, bar, opened, print_json, print_result


def download(
    path: PathOf,
    output: Annotated[Path, typer.Option(help="The folder to write its files to.")] = Path(),
    archive: Annotated[
        Path | None, typer.Option(help="Write one tar with all its files here instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint's adapter to a folder that plain PEFT, vLLM and merge tools read.

    An interrupted download resumes where it stopped.
    """
    with opened() as service, bar(path.rpartition("/")[2], shown=not as_json) as progress:
        if archive is None:
            files = service.download_checkpoint(path, output, progress)
        else:
            service.download_checkpoint_archive(path, archive, progress)
            output, files = archive.parent, [archive.name]
    if as_json:
        print_json({"tinker_path": path, "folder": output, "files": files})
    else:
        typer.echo(archive or output)


def upload(
    source: Annotated[Path, typer.Argument(help="A PEFT folder, or a tar of one.", exists=True)],
    base_model: Annotated[str, typer.Option(help="The base model it was trained on.")],
    name: Annotated[str, typer.Option(help="What to call the checkpoint.")],
    ttl_seconds: Annotated[
        int | None, typer.Option(min=1, help="Delete it after so long; by default never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a LoRA adapter trained elsewhere: safetensors, in the format of PEFT."""
    with opened() as service, bar(source.name, shown=not as_json) as progress:
        path = service.upload_checkpoint(
            source, base_model, name, ttl_seconds=ttl_seconds, progress=progress
        )
    print_result({"tinker_path": path}, path, as_json=as_json)
