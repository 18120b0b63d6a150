"""Every operation of the API and of the pages, each with a request that is valid for a tenant's objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from fastapi.routing import APIRoute, iter_route_contexts

from cotrain.wire.codec import PROTOBUF
from cotrain.wire.proto import wire_pb2 as wire
from cotrain_server.app import ROUTES
from tests.support.http_api import POOL, pass_body, sample_body
from tests.support.kl_bodies import kl_datum_body
from tests.support.uploads import adapter, tar

API = "/api/v1/"
ADMIN = f"{API}admin/"
#: Routes that accept only the admin key. For other keys they do not exist.
OF_THE_OPERATOR = (ADMIN, f"{API}fleet", "/metrics")
CHECKPOINT = f"{API}training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}"
CHAT = {"model": POOL.base_model, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
#: A custom loss that returns the sum of its first input.
LOSS = {
    "custom_loss_seq_id": 0,
    "name": "a",
    "inputs": [{"name": "logprobs", "rank": 1}],
    "graph": {
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "call_function", "name": "out", "target": "torch.sum", "args": [{"ref": "logprobs"}]},
            {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "out"}, {"dict": {}}]}]},
        ]
    },
}
#: Start of an upload of `adapter()`.
EXTERNAL = {"base_model": POOL.base_model, "lora_config": {"rank": 4, "train_mlp": False, "train_unembed": False}}
MULTIPART = "multipart/form-data; boundary=x"
#: Operations that end something, in this order at the end, because others need it.
ENDS = (
    f"DELETE {API}webhook", f"DELETE {CHECKPOINT}", f"POST {API}unload_model",
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/close",
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/close", f"POST {API}sessions/{{session_id}}/finish",
    f"DELETE {ADMIN}tenants/{{tenant_id}}/keys/{{key_id}}",
    "POST /ui/tenants/{tenant_id}/keys/{key_id}/revoke",
    "POST /ui/logout", f"DELETE {API}auth/apikey/me",
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """Method of a route."""

    method: str
    path: str
    """Path of the router."""

    @property
    def name(self) -> str:
        """Key in REQUESTS, and label in a failed test."""
        return f"{self.method} {self.path}"

    @property
    def is_page(self) -> bool:
        """Return True if browsers request it."""
        return self.path == "/" or self.path.startswith("/ui")

    @property
    def is_of_operator(self) -> bool:
        """Return True if only the operator may use it."""
        pages = ("/ui/tenants", "/ui/workers", "/ui/audit", "/ui/settings")
        return self.path.startswith(OF_THE_OPERATOR + pages)


@dataclass(frozen=True)
class Things:
    """Objects of a tenant. `ids` fill the paths."""

    ids: Mapping[str, str]
    run: str
    session: str
    sampler: str
    path: str
    """Path of its checkpoint."""
    texts: tuple[str, ...] = ()
    """Texts that no other tenant may read, and that no request contains."""


@dataclass(frozen=True)
class Sent:
    """Request without its path: one of the bodies, with query and headers."""

    json: Any = None
    form: Mapping[str, str] | None = None
    content: bytes | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def operations() -> list[Operation]:
    """Return every operation of the application, with those that end something last."""
    found = {
        Operation(method, context.path or "")
        for context in iter_route_contexts(ROUTES.routes)
        if isinstance(context.original_route, APIRoute)
        for method in context.original_route.methods or ()
    }
    places = {name: place for place, name in enumerate(ENDS, 1)}
    return sorted(found, key=lambda found: (places.get(found.name, 0), found.name))


def request_of(operation: Operation, things: Things) -> Sent:
    """Return the request of an operation. Raises KeyError if it changes something and has no entry here."""
    make = REQUESTS.get(operation.name, _bare) if operation.method in {"GET", "DELETE"} else REQUESTS[operation.name]
    return make(things)


def path_of(operation: Operation, things: Things) -> str:
    """Return the path of an operation. Raises KeyError for a parameter missing from `Things.ids`."""
    return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: things.ids[found[1]], operation.path)


async def send(
    http: httpx.AsyncClient, operation: Operation, things: Things, headers: Mapping[str, str]
) -> httpx.Response:
    """Send the request of an operation."""
    sent = request_of(operation, things)
    return await http.request(
        operation.method, path_of(operation, things), params=sent.query, json=sent.json,
        data=sent.form, content=sent.content, headers={**sent.headers, **headers},
    )  # fmt: skip


def _bare(_: Things) -> Sent:
    return Sent()


def _json(**fields: Any) -> Callable[[Things], Sent]:
    return lambda _: Sent(json=fields)


def _form(**fields: str) -> Callable[[Things], Sent]:
    return lambda _: Sent(form=fields)


def _of_run(seq: int, **fields: Any) -> Callable[[Things], Sent]:
    return lambda own: Sent(json={"model_id": own.run, "seq_id": seq, **fields})


def _today(_: Things) -> Sent:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    days = {"starting_on": now - timedelta(days=1), "ending_before": now}
    return Sent(query={name: at.isoformat() for name, at in days.items()})


def _upload(own: Things) -> Sent:
    query = {"base_model": POOL.base_model, "name": "up", "session_id": own.session}
    return Sent(content=tar(adapter()), query={**query, "model_seq_id": "12"})


def _upload_form(_: Things) -> Sent:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.tar"\r\n\r\n'
    return Sent(content=head + tar(adapter()) + b"\r\n--x--\r\n", headers={"Content-Type": MULTIPART})


def _sweep(own: Things) -> Sent:
    batch = wire.ForwardBackwardRequest(loss_fn="cross_entropy").SerializeToString()
    runs = wire.SweepRuns(prefix=own.run, seq_ids=[30])
    content = wire.SweepPassRequest(runs=runs, pass_request=batch).SerializeToString()
    return Sent(content=content, headers={"Content-Type": PROTOBUF})


def _poll(own: Things) -> Sent:
    """Make the poll that would remove everything: a cursor after every end, and each result acknowledged."""
    target = {"type": "sampling_session", "sampling_session_id": own.sampler}
    read = [f"{own.sampler}:{seq}" for seq in range(4)]
    return Sent(
        json={
            "target": {**target, "cloned_sampler_id": 0},
            "prev_cursor": 2**53,
            "timeout": 0,
            "retrieved_request_ids": read,
        }
    )


#: A GET or DELETE without an entry has no body. Every other operation has an entry here.
REQUESTS: Mapping[str, Callable[[Things], Sent]] = {
    f"POST {API}retrieve_future": lambda own: Sent(json={"request_id": f"{own.sampler}:0"}),
    f"POST {API}retrieve_futures": _poll,
    f"POST {API}cancel_future": lambda own: Sent(json={"request_id": f"{own.sampler}:1"}),
    f"POST {API}forward_backward": lambda own: Sent(json=pass_body(own.run, 20)),
    f"POST {API}forward": lambda own: Sent(
        json={"model_id": own.run, "seq_id": 21, "forward_input": pass_body(own.run, 1)["forward_backward_input"]}
    ),
    f"POST {API}sweep_pass": _sweep,
    f"POST {API}fork_run": lambda own: Sent(
        json={"session_id": own.session, "sampling_session_id": own.sampler, "model_seq_ids": [14]}
    ),
    f"POST {API}create_custom_loss": lambda own: Sent(json={"session_id": own.session, **LOSS}),
    f"POST {API}optim_step": _of_run(22, adam_params={}),
    f"POST {API}rewind": _of_run(29, step=0),
    f"POST {API}log_metrics": _of_run(28, metrics={"reward": 0.5}),
    f"POST {API}asample": lambda own: Sent(json=sample_body(own.sampler, 9)),
    f"POST {API}auth/token": _json(),
    f"POST {API}client/config": _json(sdk_version="0.38.0"),
    f"POST {API}client/dynamic_config": _json(sdk_version="0.38.0"),
    f"POST {API}create_session": _json(user_metadata={"many": "bytes" * 1000}, tags=["t"]),
    f"POST {API}session_heartbeat": lambda own: Sent(json={"session_id": own.session}),
    f"POST {API}sessions/{{session_id}}/finish": _json(reason={"type": "success"}),
    f"POST {API}telemetry": lambda own: Sent(json={"events": [], "session_id": own.session}),
    f"POST {API}create_model": lambda own: Sent(
        json={
            "session_id": own.session,
            "model_seq_id": 7,
            "base_model": POOL.base_model,
            "lora_config": {"rank": 4},
            "note": "n",
        }
    ),
    f"POST {API}get_info": lambda own: Sent(json={"model_id": own.run}),
    f"POST {API}unload_model": lambda own: Sent(json={"model_id": own.run}),
    f"POST {API}save_weights": _of_run(23, path="b"),
    f"POST {API}save_weights_for_sampler": _of_run(24, path="b"),
    f"POST {API}save_weights_external": _of_run(25, path="b"),
    f"POST {API}weights_info": lambda own: Sent(json={"tinker_path": own.path}),
    f"POST {API}load_weights": lambda own: Sent(json={"model_id": own.run, "seq_id": 26, "path": own.path}),
    f"POST {API}mint/forward_backward_reverse_kl": _of_run(
        27, reference_model_path=POOL.base_model, data=[kl_datum_body()]
    ),
    f"POST {API}mint/checkpoints/interpolate": lambda own: Sent(
        json={"source_paths": [own.path] * 2, "coefficients": [0.5, 0.5], "output_path": "mixed"}
    ),
    f"POST {CHECKPOINT}/publish": _bare,
    f"PUT {CHECKPOINT}/ttl": _json(ttl_seconds=7200),
    f"POST {CHECKPOINT}": _bare,
    f"PUT {CHECKPOINT}": _bare,
    f"POST {API}training_runs/{{run_id}}/checkpoints/{{name}}": _bare,
    f"PUT {API}training_runs/{{run_id}}/checkpoints/{{name}}": _bare,
    f"POST {API}copy_weights": lambda own: Sent(json={"source_path": own.path, "destination_project_id": "p"}),
    f"POST {API}training_runs/upload": _upload,
    f"POST {API}checkpoints/upload": _upload_form,
    f"POST {API}external_weights_upload_start": _json(**EXTERNAL),
    f"POST {API}external_weights_upload_finish": lambda own: Sent(json={"upload_id": own.ids["upload_id"]}),
    f"PUT {API}uploads/{{token}}/{{file}}": lambda _: Sent(content=b"{}"),
    f"PATCH {API}training_runs/{{run_id}}": _json(note="another", tags=["x"]),
    f"PUT {API}sessions/{{session_id}}/project": _json(project_id="p"),
    f"POST {API}sessions/search": lambda own: Sent(json={"session_id": own.session}),
    f"POST {API}checkpoints/search": _json(base_models=[POOL.base_model]),
    f"PUT {API}webhook": _json(url="https://elsewhere.invalid/hook"),
    f"POST {API}webhook/test": _bare,
    f"POST {API}create_sampling_session": lambda own: Sent(
        json={"session_id": own.session, "sampling_session_seq_id": 7, "base_model": POOL.base_model}
    ),
    f"GET {API}billing/usage/events": _today,
    f"GET {API}tokenizers": lambda _: Sent(query={"base_model": POOL.base_model}),
    "POST /oai/api/v1/completions": _json(model=POOL.base_model, max_tokens=4, prompt="a"),
    "POST /oai/api/v1/chat/completions": _json(**CHAT),
    "POST /oai/api/v1/responses": _json(model=POOL.base_model, input="a"),
    "POST /oai/api/v1/responses/input_tokens": _json(model=POOL.base_model, input="a"),
    "POST /anthropic/api/v1/messages": _json(**CHAT),
    "POST /anthropic/api/v1/messages/count_tokens": _json(model=POOL.base_model, messages=CHAT["messages"]),
    # ---- Operator ------------------------------------------------------------------------------------
    f"POST {ADMIN}tenants": _json(name="new"),
    f"PATCH {ADMIN}tenants/{{tenant_id}}": _json(weight=2.0, limits={"runs": 3}),
    f"POST {ADMIN}tenants/{{tenant_id}}/pause": _json(reason="r"),
    f"POST {ADMIN}tenants/{{tenant_id}}/resume": _bare,
    f"POST {ADMIN}tenants/{{tenant_id}}/keys": _json(name="k"),
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/pause": _json(reason="r"),
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/resume": _bare,
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/move": _json(worker="w1"),
    f"POST {ADMIN}tenants/{{tenant_id}}/runs/{{run_id}}/close": _bare,
    f"POST {ADMIN}pools/{{pool_id}}/workers/{{worker_id}}/drain": _bare,
    f"POST {ADMIN}pools/{{pool_id}}/workers/{{worker_id}}/undrain": _bare,
    f"POST {ADMIN}pools/{{pool_id}}/workers/{{worker_id}}/selfcheck": _bare,
    # ---- Pages ---------------------------------------------------------------------------------------
    "POST /ui/login": _form(key="tml-nobody_x", next="/ui"),
    "POST /ui/logout": _form(),
    "POST /ui/checkpoints": lambda own: Sent(form={"path": own.path, "do": "publish"}),
    "POST /ui/checkpoints/download": lambda own: Sent(form={"path": own.path}),
    "POST /ui/playground": lambda _: Sent(
        form={"model-0": POOL.base_model, "prompt": "a", "max_tokens": "4", "temperature": "1", "seed": "0"}
    ),
    "POST /ui/tenants": _form(name="new"),
    "POST /ui/tenants/{tenant_id}/limits": _form(runs="3"),
    "POST /ui/tenants/{tenant_id}/weight": _form(weight="2"),
    "POST /ui/tenants/{tenant_id}/pause": _form(reason="r"),
    "POST /ui/tenants/{tenant_id}/resume": _form(),
    "POST /ui/tenants/{tenant_id}/keys": _form(name="k", role="member", days=""),
    "POST /ui/tenants/{tenant_id}/keys/{key_id}/revoke": _form(),
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/pause": _form(reason="r"),
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/resume": _form(),
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/move": _form(worker="w1"),
    "POST /ui/tenants/{tenant_id}/runs/{run_id}/close": _form(),
    "POST /ui/workers/{pool_id}/{worker_id}/drain": _form(),
    "POST /ui/workers/{pool_id}/{worker_id}/undrain": _form(),
    "POST /ui/workers/{pool_id}/{worker_id}/selfcheck": _form(),
}
