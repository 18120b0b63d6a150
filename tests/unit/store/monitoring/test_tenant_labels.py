"""A hundred tenants have a label, and keep it."""

from __future__ import annotations

from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.tenant_labels import OTHERS, TENANTS_SHOWN, TenantLabels


def test_the_first_hundred_keep_their_label_and_all_others_share_one() -> None:
    labels = TenantLabels()
    tenants = [TenantId(f"t{number}") for number in range(TENANTS_SHOWN + 5)]
    for _ in range(2):
        shown = [labels.label(tenant) for tenant in tenants]
        assert shown == [*tenants[:TENANTS_SHOWN], *[OTHERS] * 5]
