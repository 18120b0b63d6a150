"""How many uploads one tenant may send at once, and one process unpack."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cotrain_server.errors import TooManyUploads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cotrain_store.messages.ids import TenantId

UPLOADS_PER_TENANT = 2


class UploadSlots:
    """What one process holds of uploads: some are received, one is unpacked."""

    def __init__(self) -> None:
        self.unpacking = asyncio.Lock()
        self._count_by_tenant = Counter[str]()

    @contextmanager
    def slot(self, tenant: TenantId) -> Iterator[None]:
        """Count an upload of a tenant while it lasts; raises TooManyUploads."""
        if self._count_by_tenant[tenant] >= UPLOADS_PER_TENANT:
            raise TooManyUploads
        self._count_by_tenant[tenant] += 1
        try:
            yield
        finally:
            self._count_by_tenant[tenant] -= 1
