"""Checks of the Helm chart that need no Helm: its schema of values, its commands and variables, its version.

`make test-chart` renders the chart and checks the objects.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from cotrain.cli import command_line
from cotrain_server.settings import ServerSettings
from cotrain_store.settings import PREFIX, SchedulerSettings, WorkerSettings
from tests.chart.render import CHART, examples
from tests.support.compose_files import ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = "\n".join(file.read_text() for file in [*CHART.glob("templates/*.yaml"), *CHART.glob("templates/*.tpl")])


def merged(given: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Merge values over those of the chart, as Helm does."""
    both = {
        name: merged(value, default[name]) if isinstance(value, dict) and isinstance(default.get(name), dict) else value
        for name, value in given.items()
    }
    return default | both


@pytest.mark.parametrize("example", examples())
def test_the_values_of_examples_are_valid_and_all_values_are_described(example: str) -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    assert [str(each) for each in validator.iter_errors(VALUES)] == []
    given = merged(examples()[example], VALUES)
    assert [str(each) for each in validator.iter_errors(given)] == []
    assert VALUES.keys() | {"global"} == SCHEMA["properties"].keys()


@pytest.mark.parametrize(
    ("wrong", "where", "says"),
    [
        ({"api": {"replicas": "2"}}, "api/replicas", "integer"),
        ({"pools": [{"name": "a", "baseModel": "m", "replicas": 1}]}, "pools/0", "device"),
        (
            {"pools": [{"name": "a", "baseModel": "m", "replicas": 1, "device": "tpu"}]},
            "pools/0/device", "tpu",
        ),
        ({"data": {"sise": "1Gi"}}, "data", "sise"),
        ({"data": {"size": "much"}}, "data/size", "much"),
        ({"scheduler": {"env": {"COTRAIN_REDIS_URL": "redis://x"}}}, "scheduler/env", "COTRAIN_REDIS_URL"),
        ({"redis": {"external": {"url": "memcached://x"}}}, "redis/external/url", "memcached"),
        ({"secretKeys": {"redisPassword": ""}}, "secretKeys/redisPassword", "shorter than 1"),
        ({"api": {"ingress": {"enabled": True}}}, "api/ingress/host", "shorter than 1"),
        ({"autoscaling": {"min": -1}}, "autoscaling/min", "-1"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(wrong: dict[str, Any], where: str, says: str) -> None:
    found = list(jsonschema_rs.validator_for(SCHEMA).iter_errors(merged(wrong, VALUES)))
    assert found
    found_at = [("/".join(map(str, each.instance_path)), str(each)) for each in found]
    assert any(path == where and says in text for path, text in found_at), found_at


def test_every_variable_in_the_templates_is_a_setting() -> None:
    settings = (ServerSettings, SchedulerSettings, WorkerSettings)
    known = {f"{PREFIX}{field}".upper() for each in settings for field in each.model_fields}
    named = set(re.findall(rf"\b{PREFIX.upper()}[A-Z_]+", TEMPLATES))
    assert len(named) > 10
    assert named <= known


def test_every_command_in_the_templates_is_a_module() -> None:
    modules = set(re.findall(r"command: \[python, -m, ([\w.]+)", TEMPLATES))
    assert len(modules) == 4
    for module in modules:
        assert find_spec(module) or find_spec(f"{module}.__main__")


def test_the_notes_name_existing_commands() -> None:
    text = (CHART / "templates" / "NOTES.txt").read_text()
    for words in re.findall(r"cotrain ((?:admin fleet|keys create))\b", text):
        shown = CliRunner().invoke(command_line(commands()), [*words.split(), "--help"])
        assert shown.exit_code == 0, shown.output
    assert "admin fleet" in text
    assert "keys create" in text


def commands() -> list[Any]:
    return list(entry_points(group="cotrain.commands"))


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
