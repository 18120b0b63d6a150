"""Commands `cotrain download`, `export` and `upload`: checkpoints to files, and files to checkpoints."""

import json
import tarfile
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from cotrain.clients.export import Dtype, Form
from cotrain.clients.service import ServiceClient
from cotrain.commands.terminal import AsJson, PathOf, bar, opened, print_json, print_result, stages
from cotrain.export.adapter import CONFIG


def download(
    path: PathOf,
    output: Annotated[Path, typer.Option(help="The folder to write its files to.")] = Path(),
    archive: Annotated[Path | None, typer.Option(help="Write one tar with all its files here instead.")] = None,
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
        warn_of_merge(service, _config_of(output, archive))
    if as_json:
        print_json({"tinker_path": path, "folder": output, "files": files})
    else:
        typer.echo(archive or output)


def warn_of_merge(service: ServiceClient, config: dict[str, Any]) -> None:
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


def export(
    path: PathOf,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make; missing or empty.")],
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
        str | None, typer.Option(help="Of merged weights: bfloat16, float16, float32. Default: the base's.")
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
            cast("Form", forms[0]),
            base=base,
            leave_out_unembed=leave_out_unembed,
            dtype=cast("Dtype | None", dtype),
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
    name: Annotated[str, typer.Option(help="What to call the checkpoint.")],
    ttl_seconds: Annotated[int | None, typer.Option(min=1, help="Delete it after so long; by default never.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a LoRA adapter trained elsewhere: safetensors, in the format of PEFT."""
    with opened() as service, bar(source.name, shown=not as_json) as progress:
        path = service.upload_checkpoint(source, base_model, name, ttl_seconds=ttl_seconds, progress=progress)
    print_result({"tinker_path": path}, path, as_json=as_json)
