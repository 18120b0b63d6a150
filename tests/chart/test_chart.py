"""Checks of the chart that need Helm and the Kubernetes schemas: `make test-chart`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.chart.render import CHART, examples, rendered

pytestmark = pytest.mark.chart

#: Oldest version that Chart.yaml allows, and the newest with published schemas.
VERSIONS = ("1.29.0", "1.37.0")
#: API groups of optional operators, whose schemas are not among those of Kubernetes.
OTHERS = ("keda.sh/", "monitoring.coreos.com/", "leaderworkerset.x-k8s.io/")


@pytest.mark.parametrize("name", examples())
def test_helm_finds_nothing_wrong(name: str) -> None:
    from helm_python import lint

    report = lint(CHART, examples()[name])
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", examples())
def test_every_object_matches_the_kubernetes_schema(name: str, version: str) -> None:
    import kubernetes_validate

    documents = [each for each in yaml.safe_load_all(rendered(examples()[name])) if each]
    ours = [each for each in documents if not each["apiVersion"].startswith(OTHERS)]
    assert len(ours) > 10
    for each in ours:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"api": {"replicas": 0}}, "'/api/replicas': minimum: got 0, want 1"),
        ({"poolz": []}, "additional properties 'poolz' not allowed"),
        ({"env": {"COTRAIN_PORT": "1"}}, "invalid propertyName 'COTRAIN_PORT'"),
        ({"redis": {"external": {"url": "http://r"}}}, "'/redis/external/url': 'http://r'"),
    ],
)
def test_helm_rejects_an_invalid_value_and_names_it(values: dict[str, Any], says: str) -> None:
    from helm_python import HelmValuesError

    with pytest.raises(HelmValuesError) as refused:
        rendered(values)
    assert says in str(refused.value)


POOL = {"name": "a", "baseModel": "m", "replicas": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"pools": [POOL, POOL | {"baseModel": "n"}]}, "pools: two have one name."),
        (
            {"pools": [POOL, POOL | {"name": "b"}], "autoscaling": {"enabled": True}},
            "autoscaling: two of pools have one baseModel",
        ),
    ],
)
def test_helm_rejects_values_that_the_schema_cannot_check(values: dict[str, Any], says: str) -> None:
    from helm_python import HelmRenderError

    with pytest.raises(HelmRenderError) as refused:
        rendered(values)
    assert says in str(refused.value)


def test_parts_that_a_pool_omits_are_not_rendered() -> None:
    assert "COTRAIN_BASE_MODEL" in rendered({"pools": [POOL]})


def test_the_notes_name_the_installed_parts() -> None:
    from helm_python import Chart

    found = Chart.load(CHART).render({}, name="demo", namespace="ml")
    (notes,) = (text for path, text in found.items() if path.endswith("NOTES.txt"))
    assert "service/demo-cotrain-edge 8000" in notes
    assert "--from-literal=redis-password=" in notes
