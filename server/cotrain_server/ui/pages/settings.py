"""The settings of the API process that answers, secrets hidden; for the operator, to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from cotrain_server.ui.page import Look, Page

HIDDEN = "hidden"
_SECRET_WORDS = ("key", "password", "secret", "token")


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data."""
    settings = look.services.settings
    defaults = {name: field.default for name, field in type(settings).model_fields.items()}
    return {
        "settings": [
            {
                "name": f"COTRAIN_{name.upper()}",
                "value": shown(name, getattr(settings, name)),
                "is_default": getattr(settings, name) == default,
            }
            for name, default in defaults.items()
        ]
    }


def shown(name: str, value: Any) -> str:
    """Write a setting without what would open anything."""
    if value is None or value == ():
        return ""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, tuple):
        return ", ".join(shown(name, each) for each in value)
    if isinstance(value, BaseModel):
        return " ".join(f"{quota}={number}" for quota, number in value)
    text = str(value)
    if isinstance(value, str) and any(word in name for word in _SECRET_WORDS):
        return HIDDEN
    parts = urlsplit(text) if "://" in text else None
    if parts and "@" in parts.netloc:
        where = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"{HIDDEN}@{where}").geturl()
    return text


PAGE = Page("/ui/settings", "Settings", "settings.html", read, for_operator=True)
