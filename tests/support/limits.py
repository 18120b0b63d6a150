"""Limits that are the same for every tenant."""

from __future__ import annotations

from typing import TypeVar

from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.policies import LimitsOf

_Limits = TypeVar("_Limits")


def always(limits: _Limits) -> LimitsOf[_Limits]:
    """Return the same limits for every tenant."""

    async def limits_of(_: TenantId) -> _Limits:
        return limits

    return limits_of
