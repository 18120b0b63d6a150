"""Compose files and Dockerfile compared with the code, without a container engine."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from cotrain_server.app import create_app
from cotrain_server.http.connection_limits import MAX_CONNECTIONS, RESERVED_DESCRIPTORS
from cotrain_server.settings import ServerSettings
from cotrain_store.settings import PREFIX, SchedulerSettings, StoreSettings, WorkerSettings
from tests.support.compose_files import (
    INTERPOLATION,
    ROOT,
    dockerfile_instructions,
    environment,
    interpolate,
    module_of,
    read_compose,
)

COMPOSE = read_compose("docker-compose.yml")
GPU = read_compose("docker-compose.gpu.yml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS: dict[str, type[BaseSettings]] = {
    "api": ServerSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
#: Every folder that a process may write to.
WRITABLE = {"/data", "/tmp"}
#: User and writable folder of each third-party image.
OTHERS = {"prometheus": ("65534:65534", {"/prometheus", "/tmp"}), "grafana": ("472:0", {"/var/lib/grafana", "/tmp"})}

#: Keys that docker-compose 1.29 and Compose v2 both support.
TOP_LEVEL = {"services", "networks", "volumes", "configs", "secrets"}


@pytest.mark.parametrize("service", SETTINGS)
def test_every_container_runs_an_existing_module(service: str) -> None:
    package = module_of(SERVICES[service]["command"])
    assert find_spec(f"{package}.__main__") is not None


@pytest.mark.parametrize("service", SETTINGS)
def test_the_default_command_of_an_image_is_that_of_one_of_its_services(service: str) -> None:
    target = SERVICES[service]["build"]["target"]
    stage = next(i for i, (_, args) in enumerate(INSTRUCTIONS) if args.endswith(f" AS {target}"))
    command = next(args for name, args in INSTRUCTIONS[stage:] if name == "CMD")
    assert module_of(json.loads(command)) in {
        module_of(other["command"]) for other in SERVICES.values() if other.get("build", {}).get("target") == target
    }


@pytest.mark.parametrize("service", SETTINGS)
def test_every_variable_is_a_setting_of_the_process_that_gets_it(service: str) -> None:
    given = {*SERVICES[service]["environment"], *GPU["services"].get(service, {}).get("environment", {})}
    known = {f"{PREFIX}{name}".upper() for name in SETTINGS[service].model_fields}
    assert {name for name in given if name.startswith(PREFIX)} <= known


@pytest.fixture
def given(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Set the variables of a container's process, with its password in a temporary folder."""
    variables = image_environment() | environment(SERVICES[service])
    (tmp_path / "redis-password").write_text("s3cret")
    file = Path(variables["COTRAIN_REDIS_PASSWORD_FILE"])
    assert any(volume == f"secret:{file.parent}:ro" for volume in SERVICES[service]["volumes"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace(str(file.parent), str(tmp_path)))
    return variables


@pytest.mark.parametrize("service", SETTINGS)
@pytest.mark.usefixtures("given")
def test_a_process_starts_with_the_settings_it_is_given(service: str) -> None:
    settings = SETTINGS[service]()
    assert isinstance(settings, StoreSettings)
    assert settings.redis_url == "redis://:s3cret@redis:6379/0"


def test_the_number_of_workers_is_free() -> None:
    """With `--scale worker=4`, no resource may belong to one container only."""
    worker = SERVICES["worker"]
    assert not {"container_name", "hostname", "ports"} & worker.keys()
    assert "COTRAIN_WORKER_ID" not in worker["environment"]
    assert "data:/data" in worker["volumes"]  # the locks of worker ids are there


def test_the_gpu_file_only_adds_to_the_worker() -> None:
    assert set(GPU["services"]) == {"worker"}
    (device,) = GPU["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert ("count" in device) != ("device_ids" in device)
    assert GPU["services"]["worker"]["environment"]["COTRAIN_DEVICE"] == "cuda"


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_the_compose_files_use_keys_of_both_compose_versions(name: str) -> None:
    top = {key for key in read_compose(name) if not key.startswith("x-")}
    assert top <= TOP_LEVEL


def test_every_limit_of_the_server_can_be_set() -> None:
    limits = {
        name for name in SETTINGS["api"].model_fields
        if name.startswith("max_") or name in ("quotas", "disk_reserve_bytes")
    }  # fmt: skip
    assert {f"{PREFIX}{name}".upper() for name in limits} <= set(SERVICES["api"]["environment"])


def test_every_compose_setting_is_described_at_the_top_of_the_file() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    header = text.partition("\nx-process")[0]
    passed_on = {n for s in SETTINGS for n, v in SERVICES[s]["environment"].items() if v is None}
    settable = {found["name"] for found in INTERPOLATION.finditer(text)} | passed_on
    assert {name for name in settable if name not in header} == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_has_no_unneeded_rights(service: str) -> None:
    container = SERVICES[service]
    user, others_writable = OTHERS.get(service, ("10001:10001", None))
    if service == "edge":
        others_writable = {"/tmp"}
    assert container["user"].split()[0] == user
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert ("USER", "10001:10001") in INSTRUCTIONS
    mounts = [volume.rsplit(":", 1) for volume in container["volumes"]]
    writable = {path for *_, path in mounts if path != "ro"} | set(container["tmpfs"])
    ours = WRITABLE | ({"/redis", "/secret"} if service == "redis" else set())
    assert writable == (others_writable or ours)


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_has_a_memory_and_a_process_limit(service: str) -> None:
    assert interpolate(SERVICES[service]["mem_limit"]).endswith("g")
    assert SERVICES[service]["pids_limit"] <= 4096


def test_redis_has_twice_its_memory() -> None:
    config = (ROOT / "docker" / "redis" / "redis.conf").read_text()
    (maxmemory,) = re.findall(r"^maxmemory (\d+)gb$", config, re.MULTILINE)
    (limit,) = re.findall(r"(\d+)g", interpolate(SERVICES["redis"]["mem_limit"]))
    assert int(limit) > 2 * int(maxmemory)


def test_redis_publishes_no_port_and_has_an_internal_network() -> None:
    assert "ports" not in SERVICES["redis"]
    assert SERVICES["redis"]["networks"] == ["store"]
    assert COMPOSE["networks"]["store"]["internal"] is True


def test_only_serving_and_fetching_containers_have_outside_access() -> None:
    outside = {name for name, service in SERVICES.items() if service["networks"] != ["store"]}
    assert outside == {"api", "edge", "model", "prometheus", "grafana"}
    assert {name for name, each in SERVICES.items() if "ports" in each} == {"edge", "grafana"}
    assert SERVICES["prometheus"]["networks"] == ["store", "observe"]
    assert SERVICES["grafana"]["networks"] == ["observe", "default"]
    assert COMPOSE["networks"]["observe"]["internal"] is True
    assert environment(SERVICES["worker"])["COTRAIN_OFFLINE"] == "true"
    assert environment(SERVICES["worker"])["HF_HUB_OFFLINE"] == "1"


def test_the_edge_has_only_variables_of_its_configuration_and_the_pages_describe_them() -> None:
    config = (ROOT / "docker" / "edge" / "haproxy.cfg").read_text()
    preset = set(re.findall(r"presetenv (EDGE_\w+)", config))
    read = set(re.findall(r"\$(EDGE_\w+)", config))
    assert read - preset == {"EDGE_CERTIFICATE"}  # without a value there is no TLS
    assert preset <= read
    edge = SERVICES["edge"]
    assert set(edge["environment"]) <= read
    assert environment(edge)["EDGE_API"] == "api:8000"
    assert str(ServerSettings.model_fields["max_upload_bytes"].default) in config
    assert environment(edge)["EDGE_MAX_BODY_BYTES"] in config
    assert environment(SERVICES["api"])["COTRAIN_TRUSTED_PROXIES"] == "*"
    page = (ROOT / "docs" / "operate" / "behind-a-proxy.md").read_text()
    assert {name for name in read if f"`{name}`" not in page} == set()
    # Two descriptors per connection, and the default for the API in `maxconn`.
    (descriptors,) = re.findall(r"fd-hard-limit (\d+)", config)
    assert edge["ulimits"]["nofile"]["hard"] == int(descriptors) > 2 * MAX_CONNECTIONS
    (most,) = re.findall(r"maxconn (\d+)", config)
    assert int(most) < SERVICES["api"]["ulimits"]["nofile"]["hard"] - RESERVED_DESCRIPTORS


def test_the_model_fetcher_has_no_key_and_ends_before_the_worker_starts() -> None:
    model, worker = SERVICES["model"], SERVICES["worker"]
    assert {n for n in model["environment"] if n.startswith(PREFIX)} == set()
    assert not any(volume.startswith("secret:") for volume in model["volumes"])
    assert worker["depends_on"]["model"]["condition"] == "service_completed_successfully"
    assert model["command"][-1] == worker["environment"]["COTRAIN_BASE_MODEL"]
    assert find_spec(module_of(model["command"])) is not None


def test_the_libraries_of_a_server_start_one_thread() -> None:
    bounds = {name for _, args in INSTRUCTIONS for name in re.findall(r"(\w+_NUM_THREADS)=1", args)}
    assert bounds == {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    assert ("ENV", "GOMP_SPINCOUNT=10000") in INSTRUCTIONS


def test_all_processes_wait_for_redis_and_are_restarted() -> None:
    for service in SETTINGS:
        assert SERVICES[service]["depends_on"]["redis"]["condition"] == "service_healthy"
    restarts = {name: service["restart"] for name, service in SERVICES.items()}
    assert restarts.pop("model") == "no"
    assert {*restarts.values()} == {"unless-stopped"}


@pytest.mark.parametrize("service", ["api"])
@pytest.mark.usefixtures("given")
def test_the_health_checks_request_existing_pages(service: str) -> None:
    paths = set(create_app(ServerSettings()).openapi()["paths"])
    checks = [SERVICES[name]["healthcheck"]["test"] for name in (service, "worker")]
    for _, *command, url in checks:
        assert find_spec(module_of(command)) is not None
        assert re.sub(r"^http://[^/]+:8000", "", url) in paths


@pytest.mark.parametrize("service", SERVICES)
def test_mounted_folders_are_in_the_repository(service: str) -> None:
    for volume in SERVICES[service]["volumes"]:
        source = volume.partition(":")[0]
        if source.startswith("./"):
            assert (ROOT / source).is_dir()
        elif not source.startswith("${"):
            assert source in COMPOSE["volumes"]


def test_metrics_are_exposed_only_to_prometheus() -> None:
    config = yaml.safe_load((ROOT / "docker" / "observe" / "prometheus.yml").read_text())
    looked_at = {name for job in config["scrape_configs"] for name in _targets(job)}
    ports = {name: environment(SERVICES[name])["COTRAIN_METRICS_PORT"] for name in SETTINGS}
    assert looked_at == {f"{name}:{port}" for name, port in ports.items()}
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert not any("9464" in port for of_one in published.values() for port in of_one)
    assert {name for name, service in SERVICES.items() if "profiles" in service} == OTHERS.keys()


def _targets(job: dict[str, Any]) -> list[str]:
    """Return the scrape targets of a job. A name stands for all containers of a service."""
    static = [each for one in job.get("static_configs", ()) for each in one["targets"]]
    found = [f"{n}:{dns['port']}" for dns in job.get("dns_sd_configs", ()) for n in dns["names"]]
    return static + found


def test_the_images_are_built_from_existing_files_not_ignored_by_docker() -> None:
    let_through = (ROOT / ".dockerignore").read_text()
    for name, arguments in INSTRUCTIONS:
        *sources, _ = arguments.split()
        if name == "COPY" and not arguments.startswith("--from"):
            for source in sources:
                assert (ROOT / source).exists()
                assert source == "." or f"!{source}\n" in let_through


def test_the_server_image_installs_nothing_that_needs_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = " ".join(extras["server"] + extras["scheduler"])
    assert not re.search(r"\b(torch|transformers|peft|workers)\b", needed)
    installed = [args for args in installs() if "server.txt" in args]
    assert len(installed) == 1


def test_every_package_of_an_image_except_torch_has_a_hash() -> None:
    unchecked = [
        args for args in installs()
        if not re.search(r"--constraint \$PINS|--require-hashes|--no-index", args)
    ]  # fmt: skip
    assert [args.split()[-1] for args in unchecked] == ["torch"]
    assert ("ARG", "PINS=pins/hashes.txt") in INSTRUCTIONS


def installs() -> list[str]:
    """Return the calls of pip that install packages."""
    ran = " && ".join(args for name, args in INSTRUCTIONS if name == "RUN")
    return [command for command in ran.split("&&") if "pip install" in command]


def image_environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets for the processes."""
    variables = " ".join(args for name, args in INSTRUCTIONS if name == "ENV")
    return dict(re.findall(rf"({PREFIX}\w+)=(\S+)", variables))


INSTRUCTIONS = dockerfile_instructions()
