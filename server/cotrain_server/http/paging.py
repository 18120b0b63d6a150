"""How a list is asked for: which part of it, and whose."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from cotrain.wire.rest import MAX_PAGE, AccessScope

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Scope = Annotated[AccessScope, Query()]
