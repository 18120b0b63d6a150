"""Commands of the official CLI, and the output that each must print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.conformance.running import KEYS

KEY = KEYS[3]


@dataclass(frozen=True)
class Command:
    """One command, and its expected output, or its expected error output if it is rejected.

    `{run}`, `{session}` and other placeholders stand for real ids.
    """

    argv: str
    says: tuple[str, ...]
    input: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


WORKS = {
    "version": Command("version", ("tinker 0.38.0",)),
    "auth status": Command("auth status", ("Credentials available: yes", "accessible: yes")),
    "model list": Command("model list", ("Trainable",)),
    "run list": Command(
        "run list --columns id,model,owner,lora,updated,status,checkpoint", ("{run}", "OK", "weights/three")
    ),
    "run list, cut": Command("run list --limit 1", ("more not shown",)),
    "run list, all": Command("-f json run list --limit 0", ('"training_run_id"',)),
    "run info": Command(
        "run info {run}", ("{run}", "Rank 4", "weights/three", "sampler_weights/sampled", "team", "red")
    ),
    "checkpoint list": Command("checkpoint list", ("weights/one", "sampler_weights/sampled", "external_weights/plain")),
    "checkpoint list, cut": Command("checkpoint list --limit 1", ("more not shown",)),
    "checkpoint list, of a run": Command("-f json checkpoint list --run-id {run}", ('"checkpoint_id": "weights/one"',)),
    "checkpoint info": Command("checkpoint info tinker://{run}/weights/one", ("weights/one", "Training")),
    "checkpoint publish": Command("checkpoint publish tinker://{run}/weights/two", ()),
    "checkpoint info, published": Command("-f json checkpoint info tinker://{run}/weights/two", ('"public": true',)),
    "checkpoint unpublish": Command("checkpoint unpublish tinker://{run}/weights/two", ()),
    "checkpoint info, unpublished": Command("-f json checkpoint info tinker://{run}/weights/two", ('"public": false',)),
    "checkpoint set-ttl": Command("checkpoint set-ttl tinker://{run}/weights/two --ttl 7200", ()),
    "checkpoint info, with a ttl": Command(
        "-f json checkpoint info tinker://{run}/weights/two", ('"expires_at": "20',)
    ),
    "checkpoint set-ttl, none": Command("checkpoint set-ttl tinker://{run}/weights/two --remove", ()),
    "checkpoint info, without a ttl": Command(
        "-f json checkpoint info tinker://{run}/weights/two", ('"expires_at": null',)
    ),
    "checkpoint download, external": Command(
        "checkpoint download tinker://{run}/external_weights/plain -o plain", ("plain",)
    ),
    "checkpoint download, training": Command("checkpoint download tinker://{run}/weights/one -o trained", ("trained",)),
    "checkpoint push-hf": Command(
        "checkpoint push-hf tinker://{run}/weights/one --repo somebody/adapter",
        ("somebody/adapter",),
        env={"HF_ENDPOINT": "{hub}", "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0"},
    ),
    "checkpoint delete": Command("checkpoint delete --yes tinker://{run}/weights/three", ("Deleted 1 checkpoint",)),
    "checkpoint delete, of none": Command(
        "checkpoint delete --yes tinker://{run}/weights/none",
        ("Deleted 0", "Failed to delete 1", "Checkpoint not found"),
    ),
    "checkpoint delete, of a run": Command(
        "checkpoint delete --yes --run-id {other} --type sampler", ("Deleted 1 checkpoint",)
    ),
    "session export-trace": Command("session export-trace {session} -o own.pftrace", ("own",)),
    "session export-trace, its url": Command("session export-trace {session} --url-only", ("/api/v1/traces/",)),
    "billing usage": Command("billing usage {since} {until}", ("training", "checkpoint")),
    "billing usage, as csv": Command(
        "billing usage {since} {until} --csv - --sessions-csv sessions.csv", ("token_count", "training")
    ),
    "billing checkpoint-storage": Command("billing checkpoint-storage", ("checkpoint_count", "nightly")),
    "billing checkpoint-storage, of a project": Command(
        "-f json billing checkpoint-storage --project-id none", ('"data": []',)
    ),
}
REFUSED = {
    "auth status": Command(
        "auth status", ("Authentication failed", "Invalid API key"), env={"TINKER_API_KEY": "tml-no_key"}
    ),
    "auth login": Command("auth login", ("Could not validate", "Invalid API key"), input="tml-no_key\n"),
    "auth logout": Command("auth logout", ("nothing to log out from",)),
    "auth whoami": Command("auth whoami", ("requires JWT auth",)),
    "run info": Command("run info {session}:train:77", ("Resource not found", "Training run not found")),
    "run info, of no run": Command("run info ..%2f", ("Resource not found",)),
    "checkpoint list": Command("checkpoint list --run-id {session}:train:77", ("Training run not found",)),
    "checkpoint info": Command("checkpoint info tinker://{run}/weights/none", ("Checkpoint not found",)),
    "checkpoint publish": Command("checkpoint publish tinker://{run}/weights/none", ("Checkpoint not found",)),
    "checkpoint set-ttl": Command("checkpoint set-ttl tinker://{run}/weights/two --ttl 10", ("3600",)),
    "checkpoint download": Command("checkpoint download tinker://{run}/weights/none", ("Checkpoint not found",)),
    "checkpoint download, sampler": Command("checkpoint download tinker://{run}/sampler_weights/sampled", ("sampler",)),
    "checkpoint push-hf": Command("checkpoint push-hf tinker://{run}/external_weights/plain", ("Not logged in",)),
    "session export-trace, of no cycle": Command(
        "session export-trace {idle}", ("Trace export failed", "GET /api/v1/usage")
    ),
    "session export-trace, of none": Command("session export-trace none", ("Session not found",)),
    "billing usage": Command("billing usage 2026-07-13T00:30:00Z 2026-07-13T01:00:00Z", ("a full UTC hour",)),
    "billing usage, too long": Command("billing usage 2026-06-01T00:00:00Z 2026-07-01T00:00:00Z", ("at most 14 days",)),
}
#: Commands with a key that is exchanged for a token, and with a separate home folder.
SIGNED_IN = {
    "auth whoami": Command("auth whoami", ("Organization",), env={"TINKER_API_KEY": "{token}"}),
    "auth login": Command("auth login", ("Logged in as",), input=KEY + "\n"),
    "auth logout": Command("auth logout", ("Removed credential",)),
}
