"""Export and download scenarios, run under the official SDK that is first on the path.

Run together with the scenarios of checkpoints. FOLDER is the target of downloads.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyrage

from tests.conformance.checkpointing import listed, rest_of, seen, steps
from tests.conformance.scenarios import Bench, Facts, error_of


def exported(bench: Bench) -> Facts:
    """Export for other programs, unencrypted and for two age recipients, and download both."""
    folder, run = Path(os.environ["FOLDER"]), steps(bench.run())
    rest, identities = rest_of(bench), [pyrage.x25519.Identity.generate() for _ in range(2)]
    recipients = [str(identity.to_public()) for identity in identities]
    plain = run.save_weights_external("plain").result().path
    locked = run.save_weights_external("locked", age_encryption_recipients=recipients)
    paths = {"plain": plain, "locked": locked.result().path}
    urls = {name: _urls(rest, path) for name, path in paths.items()}
    address = next(iter(urls["plain"].values()))
    return {
        "paths": paths,
        "files": {
            name: {file: download(url, folder / name / file) for file, url in of_path.items()}
            for name, of_path in urls.items()
        },
        "identities": [str(identity) for identity in identities],
        "logprobs": seen(run),
        "listed": listed(rest, run),
        "recipient": error_of(lambda: run.save_weights_external("bad", age_encryption_recipients=["age1x"]).result()),
        "statuses": [_status_of(address), _status_of(address.replace("/files/", "/files/x"))],
    }


def _urls(rest: Any, path: str) -> dict[str, str]:
    answer = rest.get_external_weights_urls(path).result()
    assert answer.expires.tzinfo is not None
    return dict(answer.urls)


def _status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def archived(bench: Bench) -> Facts:
    """Download a checkpoint's archive with the API of the older SDKs."""
    run = steps(bench.run())
    path = run.save_weights_for_sampler("archived").result().path
    answer = rest_of(bench).get_checkpoint_archive_url_from_tinker_path(path).result()
    length = download(answer.url, Path(os.environ["FOLDER"]) / "archive.tar")
    return {"logprobs": seen(run), "length": length, "expires": answer.expires.timestamp()}


def download(url: str, path: Path) -> int:
    """Fetch a signed URL as the SDK does, without a key. Return its declared length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(url) as response:
        path.write_bytes(response.read())
        return int(response.headers["Content-Length"])
