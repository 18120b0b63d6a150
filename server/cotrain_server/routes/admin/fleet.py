"""How many workers each pool is to have, for an autoscaler: JSON of what `/metrics/fleet` says of it."""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.fleet import Fleet
from cotrain_server.administration.fleet import list_pools
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

router = APIRouter(
    prefix="/api/v1", tags=["admin"], route_class=OperatorRoute, dependencies=[api_key]
)


@router.get("/fleet")
async def fleet(services: ServicesDep) -> Fleet:
    """Show all pools with their workers, what waits, and how many workers are wanted."""
    return Fleet(pools=await list_pools(services))
