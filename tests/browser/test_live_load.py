"""Each page under the load of ten tenants, of which one fails, one diverges and one is refused.

`PICTURES_OF_LOAD=FOLDER` also stores a picture of each page, to look at.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

import cotrain
from cotrain import types
from cotrain_server.ui.router import PAGES
from tests.browser.browsing import BASE_MODEL, Site, Trained, train
from tests.support.serving import Serving
from tests.support.tiny_models import build_tiny_qwen3

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

TENANTS = (
    "failing", "diverging", "refused", "alice", "bob", "carla", "dmitri", "eve", "farid", "gwen",
)  # fmt: skip
KEYS = {name: f"tml-{name}_0123456789abcdef0123456" for name in TENANTS}
OPEN = [page.path for page in PAGES if page.in_navigation and not page.for_tenant]
OWN = [page.path for page in PAGES if page.in_navigation and not page.for_operator]
PAUSE_S = 0.3


def step(training: Any, learning_rate: float = 1e-3, target: int = 9) -> None:
    """Run one training step. A target outside the vocabulary fails."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([7, 8, 9, 10] * 8),
        loss_fn_inputs={"target_tokens": np.full(32, target), "weights": np.ones(32, dtype=np.float32)},
    )
    done = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
    done.result()


@contextmanager
def load(address: str, admin_key: str) -> Iterator[dict[str, str]]:
    """Run a client for each tenant until the end of the block. Yield the run of each, by tenant."""
    stop, runs = threading.Event(), dict[str, str]()

    def repeat(work: Callable[[], object]) -> None:
        while not stop.is_set():
            with suppress(cotrain.CotrainError):
                work()
            stop.wait(PAUSE_S)

    def act(name: str) -> None:
        client = cotrain.ServiceClient(base_url=address, api_key=KEYS[name])
        note = {"name": f"{name} on a dataset with a long name"} if name != "dmitri" else None
        run = client.create_lora_training_client(BASE_MODEL, rank=4, user_metadata=note)
        runs[name] = run.model_id
        if name == "failing":
            targets = itertools.cycle([9, 10**6])
            repeat(lambda: step(run, target=next(targets)))
        elif name == "diverging":
            numbers = random.Random(0)
            repeat(lambda: step(run, learning_rate=0.5, target=numbers.randrange(500)))
        elif name == "refused":
            headers = {"X-API-Key": KEYS[name]}
            asked = {"session_id": run.model_id.partition(":")[0], "base_model": BASE_MODEL}
            number = iter(range(1, 10**6))
            repeat(
                lambda: httpx.post(
                    f"{address}/api/v1/create_model",
                    headers=headers,
                    json={**asked, "model_seq_id": next(number), "lora_config": {"rank": 4}},
                )
            )
        else:
            repeat(lambda: step(run))

    tenants = httpx.get(f"{address}/api/v1/admin/tenants", headers={"X-API-Key": admin_key}).json()
    (refused,) = [each["id"] for each in tenants["tenants"] if each["name"] == "refused"]
    httpx.patch(
        f"{address}/api/v1/admin/tenants/{refused}", headers={"X-API-Key": admin_key}, json={"limits": {"runs": 1}}
    ).raise_for_status()
    threads = [threading.Thread(target=act, args=(name,), daemon=True) for name in TENANTS]
    for thread in threads:
        thread.start()
    try:
        yield runs
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


@pytest.fixture(scope="module")
def busy(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server under load, with a checkpoint of one tenant."""
    folder = tmp_path_factory.mktemp("load")
    model = build_tiny_qwen3(folder / "tiny")
    keys = [f"{name}={key}" for name, key in KEYS.items()]
    with Serving(folder / "data", [f"tiny={model}"], keys) as serving:
        admin_key = (folder / "data" / "admin-key").read_text().strip()
        train(serving.address, KEYS["alice"], "done before", 3)
        with load(serving.address, admin_key) as runs:
            admin = {"X-API-Key": admin_key}
            while True:  # until each kind of trouble is on the overview
                rows = httpx.get(f"{serving.address}/ui/overview.json", headers=admin).json()
                if len(runs) == len(TENANTS) and rows["went_wrong_tenants"] >= 2:
                    break
                time.sleep(0.5)
            trained = {name: Trained(run, []) for name, run in runs.items()}
            yield Site(serving, chromium, admin_key, KEYS, trained, folder / "data", f"tiny={model}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("who", ["operator", "failing"])
def test_each_page_is_accessible_and_fits_under_load(busy: Site, axe: str, who: str, width: int, scheme: str) -> None:
    folder = os.environ.get("PICTURES_OF_LOAD")
    with busy.seen_by(who, width, scheme) as seen:  # type: ignore[arg-type]
        for name, path in paths(busy, who).items():
            page = seen.open(path)
            page.wait_for_timeout(300)  # charts are drawn
            if folder:
                shot = Path(folder) / f"{who}-{name}-{width}-{scheme}.png"
                page.screenshot(path=shot, full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            page.evaluate(axe)
            found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].html]))")
            assert found == [], path


def paths(site: Site, who: str) -> dict[str, str]:
    """Return the address of each page, by the name of its picture."""
    listed = {path.rpartition("/")[2]: path for path in (OPEN if who == "operator" else OWN)}
    listed["run"] = f"/ui/runs/{site.runs['failing'].run}"
    if who != "operator":
        return listed
    admin = {"X-API-Key": site.admin_key}
    cycles = httpx.get(f"{site.address}/ui/cycles.json", headers=admin).json()
    tenants = httpx.get(f"{site.address}/ui/tenants.json", headers=admin).json()["tenants"]
    ids = {each["name"]: each["id"] for each in tenants}
    runs = "&".join(f"run={site.runs[name].run}" for name in ("diverging", "bob", "dmitri"))
    return {
        **listed,
        "diverging": f"/ui/runs/{site.runs['diverging'].run}",
        "unlabelled": f"/ui/runs/{site.runs['dmitri'].run}",
        "compare": f"/ui/compare?{runs}",
        "cycle": f"/ui/cycles/{cycles['pool']}/{cycles['timeline']['cycles'][-1]['cycle']}",
        "tenant": f"/ui/tenants/{ids['refused']}",
        "checkpoints": f"/ui/checkpoints?tenant={ids['alice']}",
        "playground": f"/ui/playground?tenant={ids['alice']}",
    }
