"""Settings in docs/reference/configuration.md: every setting of every process, with its default."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from cotrain_server.settings import ServerSettings
from cotrain_store.settings import PREFIX, SchedulerSettings, StoreSettings, WorkerSettings
from cotrain_store.tenants.quotas import Quotas

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1024**2, "GiB": 1024**3}
SECTIONS: dict[str, type[BaseSettings]] = {
    "Every process": StoreSettings,
    "API": ServerSettings,
    "Scheduler": SchedulerSettings,
    "Worker": WorkerSettings,
}


def told(section: str, pattern: str = "`COTRAIN_") -> dict[str, str]:
    """Return the variables of a section with their defaults."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for row in re.findall(rf"^\| ({pattern}.*)$", text, re.MULTILINE):
        names, defaults = (cell.strip().split(",") for cell in row.split("|")[:2])
        found |= dict(zip((name.strip(" `") for name in names), defaults, strict=True))
    return found


def read(default: str) -> str:
    """Convert a default of the page to the form of `written`."""
    number, _, unit = default.strip().partition(" ")
    return str(int(number) * UNITS[unit]) if unit else number


def written(default: Any) -> str:
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, Enum):
        return str(default.value)
    return "" if default in (None, (), Quotas()) else str(default)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_documented_with_its_default(section: str) -> None:
    shared = {} if section == "Every process" else StoreSettings.model_fields
    fields = {
        f"{PREFIX}{name}".upper(): "" if field.is_required() else written(field.default)
        for name, field in SECTIONS[section].model_fields.items()
        if name not in shared
    }
    assert {name: read(default) for name, default in told(section).items()} == fields


def test_every_quota_is_documented_with_its_default() -> None:
    page = told("API", "`[a-z]")
    fields = {name: written(field.default) for name, field in Quotas.model_fields.items()}
    assert {name: read(default) for name, default in page.items()} == fields
