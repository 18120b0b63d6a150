"""Download of a base model into the local cache: `python -m cotrain_workers.fetch MODEL`.

It runs next to the workers of the compose file, which have no network access. A complete model in the
cache is never updated, so a change on the hub does not affect open runs.
"""

import json
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def fetch(base_model: str) -> str:
    """Fetch a hub id, or the source in `NAME=SOURCE`, and return a sentence about the outcome.

    Raises:
        OSError: the hub does not respond, has no such model, or has it without safetensors.
    """
    name, _, given = base_model.partition("=")
    source = given or name
    if Path(source).is_dir():
        return f"{source} is a folder: nothing to fetch."
    if is_whole(_cached(source)):
        return f"{source} is in the cache: nothing is fetched."
    folder = Path(snapshot_download(source, allow_patterns=list(_FILES)))
    if not is_whole(folder):
        raise OSError(f"{source} has no weights in safetensors: this server loads no others.")
    return f"{source} is fetched."


def is_whole(folder: Path | None) -> bool:
    """Return True if a folder holds a configuration and every weight file that its index names."""
    if folder is None or not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return (folder / "model.safetensors").exists()
    return all((folder / name).exists() for name in {*json.loads(index.read_text())["weight_map"].values()})


def _cached(source: str) -> Path | None:
    try:
        return Path(snapshot_download(source, allow_patterns=list(_FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def main() -> None:
    """Run the command."""
    (base_model,) = sys.argv[1:]
    try:
        done = fetch(base_model)
    except RepositoryNotFoundError:
        sys.exit(f"There is no model {base_model} on the hub, or it needs a token (HF_TOKEN).")
    except (HfHubHTTPError, OSError) as failed:
        sys.exit(f"{base_model} could not be fetched: {str(failed).splitlines()[0]}")
    print(done)  # noqa: T201  # a command's answer


if __name__ == "__main__":
    main()
