"""Checks of the objects that the Helm chart renders: their commands, settings, rights, names and ports."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from cotrain.wire.admin import Fleet, FleetPool
from cotrain_server.app import create_app
from cotrain_server.settings import ServerSettings
from cotrain_store.redis_client.address import parse_address
from cotrain_store.settings import PREFIX, SchedulerSettings, WorkerSettings
from tests.chart.render import examples, rendered
from tests.support.compose_files import ROOT, dockerfile_instructions, module_of, read_compose

pytestmark = pytest.mark.chart

SETTINGS: dict[str, type[BaseSettings]] = {
    "api": ServerSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


@cache
def objects(example: str) -> list[dict[str, Any]]:
    """Return the objects that Helm renders with the values of an example."""
    return list(yaml.load_all(rendered(examples()[example]), Loader=yaml.CSafeLoader))


def of_kind(example: str, *kinds: str) -> list[dict[str, Any]]:
    return [each for each in objects(example) if each["kind"] in kinds]


def pods(example: str) -> dict[str, dict[str, Any]]:
    """Return every pod of an example, by the name of its controller."""
    found = of_kind(example, "Deployment", "StatefulSet", "Job")
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in found}


def containers(example: str) -> list[tuple[str, dict[str, Any]]]:
    """Return every container of an example, with the name of its pod."""
    return [
        (name, container)
        for name, pod in pods(example).items()
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    ]


ALL = pytest.mark.parametrize("example", examples())


@ALL
def test_every_process_is_an_existing_module(example: str) -> None:
    for _, container in containers(example):
        if container["command"][0] == "python":
            module = module_of(container["command"])
            assert find_spec(module) or find_spec(f"{module}.__main__")
            arguments = container["command"][3:]
            # Only the fetching process takes an argument, the base model.
            assert len(arguments) == int(module == "cotrain_workers.fetch"), container["command"]
        elif container["name"] == "edge":
            entry = next(args for name, args in dockerfile_instructions() if "haproxy.cfg" in args)
            assert container["command"] == json.loads(entry)
        else:
            assert container["command"] == ["/bin/sh", "/etc/cotrain/start.sh"]
            assert (ROOT / "docker" / "redis" / "start.sh").is_file()


@ALL
def test_every_variable_is_a_setting_and_a_process_starts_with_them(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redis-password").write_text("s3cret")
    processes = [(name, c) for name, c in containers(example) if c["name"] in SETTINGS]
    assert processes
    for name, container in processes:
        given = [each["name"] for each in container["env"]]
        assert len(given) == len(set(given))
        settings = SETTINGS[container["name"]]
        known = {f"{PREFIX}{field}".upper() for field in settings.model_fields}
        assert {each for each in given if each.startswith(PREFIX)} <= known
        secret = {
            "COTRAIN_API_KEYS": "tml-tenant_0123456789abcdef",
            "COTRAIN_ADMIN_KEY": "0123456789abcdef",
            "COTRAIN_WORKER_ID": f"{name}-0",
        }
        with monkeypatch.context() as environment:
            for each in container["env"]:
                value = each["value"] if "value" in each else secret[each["name"]]
                environment.setenv(each["name"], value.replace("/secret/", f"{tmp_path}/"))
            read = settings()
        assert "s3cret" in read.redis_url  # type: ignore[attr-defined]  # all of them have it
        parse_address(read.redis_url)  # type: ignore[attr-defined]  # raises where it is none
        assert (read.metrics_host, read.metrics_port) == ("0.0.0.0", 9464)  # type: ignore[attr-defined]  # as above


@ALL
def test_a_process_has_no_unneeded_rights(example: str) -> None:
    for name, pod in pods(example).items():
        assert pod["automountServiceAccountToken"] is False, name
        # A Service named cotrain would set COTRAIN_PORT, which is a setting here.
        assert pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert (security["runAsUser"], security["runAsGroup"], security["fsGroup"]) == (10001,) * 3
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert ("USER", "10001:10001") in dockerfile_instructions()
    for _, container in containers(example):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        written = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert written <= {"/data", "/tmp", "/redis", "/dev/shm"}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in volumes(example, container)}


def volumes(example: str, container: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the volumes of a container's pod, including its own claims."""
    found = next(p for p in pods(example).values() if container in [*p.get("initContainers", []), *p["containers"]])  # fmt: skip
    claims = of_kind(example, "StatefulSet")
    own = [c["metadata"] for s in claims for c in s["spec"].get("volumeClaimTemplates", ())]
    return [*found["volumes"], *own]


@ALL
def test_images_folders_and_ports_equal_those_of_docker_and_compose(example: str) -> None:
    compose = read_compose("docker-compose.yml")["services"]
    gpu = read_compose("docker-compose.gpu.yml")["services"]
    built = {each["image"] for each in [*compose.values(), *gpu.values()]}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for _, container in containers(example):
        image, _, tag = container["image"].rpartition("/")[2].partition(":")
        assert image in built
        assert tag == version
    instructions = dockerfile_instructions()
    assert ("EXPOSE", "8000") in instructions
    api = next(c for _, c in containers(example) if c["name"] == "api")
    assert {port["containerPort"] for port in api["ports"]} == {8000, 9464}
    assert api["command"] == compose["api"]["command"]
    worker = next(c for _, c in containers(example) if c["name"] == "worker")
    assert worker["command"] == compose["worker"]["command"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    settings = ServerSettings(redis_url="redis://r:6379/0", data_dir=tmp_path_factory.mktemp("data"))
    return set(create_app(settings).openapi()["paths"])


@ALL
def test_probes_use_existing_pages_and_do_not_depend_on_workers(example: str, pages: set[str]) -> None:
    for _, container in containers(example):
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "httpGet" not in container.get(probe, {}):
                continue
            asked = container[probe]["httpGet"]
            if ports[asked["port"]] == 9464:
                assert asked["path"] == "/metrics"
            else:
                assert asked["path"] == "/healthz"  # /readyz would keep requests from a pool at zero
                assert asked["path"] in pages


@ALL
def test_workers_have_the_name_and_the_grace_period_of_their_pods(example: str) -> None:
    sets = [s for s in of_kind(example, "StatefulSet") if not s["metadata"]["name"].endswith("-redis")]
    assert sets
    for each in sets:
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        env = {e["name"]: e for e in container["env"]}
        field = env["COTRAIN_WORKER_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.name"
        pattern = WorkerSettings.model_fields["worker_id"].metadata[0].pattern
        assert re.fullmatch(pattern, f"{each['metadata']['name']}-999")
        grace_s = pod["terminationGracePeriodSeconds"]
        assert float(env["COTRAIN_STOP_GRACE_S"]["value"]) == grace_s
        assert grace_s >= 30
        assert (env["COTRAIN_OFFLINE"]["value"], env["HF_HUB_OFFLINE"]["value"]) == ("true", "1")
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        members = int(env["COTRAIN_GROUP_SIZE"]["value"]) if "COTRAIN_GROUP_SIZE" in env else 1
        assert gpus == (members if env["COTRAIN_DEVICE"]["value"] == "cuda" else None)
        assert members == (4 if example == "group" else 1)


def test_redis_has_twice_its_memory_and_accepts_only_our_processes() -> None:
    redis = next(c for n, c in containers("default") if n.endswith("-redis"))
    config = (ROOT / "docker" / "redis" / "redis.conf").read_text()
    (maxmemory,) = re.findall(r"^maxmemory (\d+)gb$", config, re.MULTILINE)
    assert int(redis["resources"]["limits"]["memory"].removesuffix("Gi")) > 2 * int(maxmemory)
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("default", "NetworkPolicy")}
    (rule,) = policies["demo-cotrain-redis"]["ingress"]
    assert len(rule["from"]) == 2
    assert policies["demo-cotrain-redis"]["egress"] == []
    for name in ("scheduler", "workers"):
        egress = policies[f"demo-cotrain-{name}"]["egress"]
        assert [port["port"] for each in egress for port in each["ports"]] == [53, 53, 6379]
    assert "Egress" not in policies["demo-cotrain-api"]["policyTypes"]


def test_every_selector_matches_pods_of_the_chart() -> None:
    for example in examples():
        labels = [
            each["spec"]["template"]["metadata"]["labels"]
            for each in of_kind(example, "Deployment", "StatefulSet", "Job")
        ]
        for each in of_kind(example, "Service", "NetworkPolicy", "PodDisruptionBudget"):
            spec = each["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= found.items() for found in labels), each["metadata"]


def test_keda_follows_the_worker_number_of_the_fleet_page() -> None:
    (scaled,) = of_kind("keda", "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    settings = {e["name"]: e.get("value") for e in next(
        c for _, c in containers("keda") if c["name"] == "scheduler")["env"]}  # fmt: skip
    assert settings["COTRAIN_WORKERS_MIN"] == str(scaled["spec"]["minReplicaCount"]) == "0"
    assert settings["COTRAIN_WORKERS_MAX"] == str(scaled["spec"]["maxReplicaCount"])
    assert (trigger["metadata"]["targetValue"], trigger["metricType"]) == ("1", "AverageValue")
    location = trigger["metadata"]["valueLocation"]
    assert location == 'pools.#(base_model=="Qwen/Qwen3-0.6B").workers_wanted'
    assert "pools" in Fleet.model_fields
    assert {"base_model", "workers_wanted"} <= FleetPool.model_fields.keys()
    target = scaled["spec"]["scaleTargetRef"]["name"]
    (workers,) = (s for s in of_kind("keda", "StatefulSet") if s["metadata"]["name"] == target)
    assert "replicas" not in workers["spec"]
    (shown,) = of_kind("keda", "TriggerAuthentication")
    assert trigger["authenticationRef"]["name"] == shown["metadata"]["name"]
    api = next(c for _, c in containers("keda") if c["name"] == "api")
    env = {e["name"]: e for e in api["env"]}
    key = env["COTRAIN_ADMIN_KEY"]["valueFrom"]["secretKeyRef"]
    (ref,) = shown["spec"]["secretTargetRef"]
    assert (ref["name"], ref["key"]) == (key["name"], key["key"])
    # A pool that scales from zero must be configured before its first worker.
    assert env["COTRAIN_BASE_MODELS"]["value"] == "Qwen/Qwen3-0.6B"
    url = trigger["metadata"]["url"]
    names = {s["metadata"]["name"] for s in of_kind("keda", "Service")}
    assert re.fullmatch(r"http://([\w-]+)\.ml\.svc:8000/api/v1/fleet", url)[1] in names  # type: ignore[index]  # it matches


def test_the_metrics_of_the_fleet_are_scraped_from_one_target() -> None:
    (fleet,) = of_kind("keda", "ScrapeConfig")
    assert fleet["spec"]["metricsPath"] == "/metrics/fleet"
    ((target,),) = (each["targets"] for each in fleet["spec"]["staticConfigs"])
    assert target == "demo-cotrain-api-metrics.ml.svc:9464"
    for kind in ("ServiceMonitor", "PodMonitor"):
        (monitor,) = of_kind("keda", kind)
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_an_external_redis_replaces_the_one_of_the_chart() -> None:
    assert not any(name.endswith("-redis") for name in pods("external-redis"))
    for name, container in containers("external-redis"):
        if container["name"] in SETTINGS:
            env = {each["name"]: each.get("value") for each in container["env"]}
            address = parse_address(env["COTRAIN_REDIS_URL"])
            assert (address.replicas, len(address.sentinels)) == (1, 3), name
            assert "/redis-ca" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_with_an_object_store_no_volume_is_shared() -> None:
    assert of_kind("blobs", "PersistentVolumeClaim", "Job") == []
    for name, container in containers("blobs"):
        if container["name"] in SETTINGS:
            env = {each["name"]: each.get("value") for each in container["env"]}
            assert env["COTRAIN_BLOBS"] == "s3://cotrain/prod", name
        if container["name"] in ("api", "worker"):
            assert container["envFrom"] == [{"secretRef": {"name": "bucket-credentials"}}]
        if container["name"] == "base-model":
            assert "HF_HUB_OFFLINE" not in {each["name"] for each in container["env"]}
    kinds = {n: {v["name"]: v for v in p["volumes"]}.get("data") for n, p in pods("blobs").items()}
    assert kinds["demo-cotrain-api"] == kinds["demo-cotrain-scheduler"] == {"name": "data", "emptyDir": {}}
    (workers,) = (s for s in of_kind("blobs", "StatefulSet") if not s["metadata"]["name"].endswith("-redis"))  # fmt: skip
    (claim,) = workers["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data"
    egress = {p["metadata"]["name"]: p["spec"] for p in of_kind("blobs", "NetworkPolicy")}["demo-cotrain-workers"]["egress"]  # fmt: skip
    assert [port["port"] for each in egress for port in each["ports"]] == [53, 53, 6379, 443, 9000]


def test_the_edge_reaches_the_api_and_is_the_only_trusted_proxy() -> None:
    services = {s["metadata"]["name"] for s in of_kind("blobs", "Service")}
    edge = next(c for _, c in containers("blobs") if c["name"] == "edge")
    given = {each["name"]: each["value"] for each in edge["env"]}
    assert given.pop("EDGE_API").removesuffix(":8000") in services
    assert given == {"EDGE_CERTIFICATE": "/certs/tls.crt", "EDGE_KEY_REQUESTS": "8000"}
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind("blobs", "NetworkPolicy")}
    (rule, _) = policies["demo-cotrain-api"]["ingress"]
    assert [*map(list, rule["from"])] == [["ipBlock"], ["podSelector"]]
    for example, trusted in (("default", "*"), ("gpu", None)):
        api = next(c for _, c in containers(example) if c["name"] == "api")
        env = {each["name"]: each.get("value") for each in api["env"]}
        assert env.get("COTRAIN_TRUSTED_PROXIES") == trusted
        assert any(n.endswith("-edge") for n in pods(example)) == (trusted is not None)


def test_the_base_models_and_quotas_of_the_example_are_passed_on() -> None:
    api = next(c for _, c in containers("gpu") if c["name"] == "api")
    env = {each["name"]: each.get("value") for each in api["env"]}
    assert env["COTRAIN_BASE_MODELS"] == "Qwen/Qwen3-8B,our/model"
    assert env["COTRAIN_QUOTAS"] == "ops=1000"
    assert len(of_kind("gpu", "Job")) == 2
