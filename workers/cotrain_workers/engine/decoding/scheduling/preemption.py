"""Who gives way when memory is short: the youngest sequence of the tenant that has most of it. Pure.

A waiting sequence may take from a tenant that keeps no less than its own tenant would then have. So what
was given to one is never taken back by the other in turn. A tenant that runs nothing may also take from
one whose sequence had its lease: it has generated for a while since it was admitted last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cotrain_workers.engine.decoding.scheduling.pages import Pages
from cotrain_workers.engine.decoding.scheduling.queues import TenantQueue
from cotrain_workers.engine.decoding.sequence import SequenceState

#: Tokens that an admitted sequence may generate before a tenant that runs nothing can take its place; of a
#: long one more, since all it holds is computed again.
LEASE_TOKENS, LEASE_SHARE = 256, 8


def largest_holder(queues: Mapping[str, TenantQueue], pages: Pages, asks: str) -> SequenceState:
    """Return who gives way to a running sequence of the tenant `asks` that needs one page more.

    It may be the sequence itself: then the others, of whom none holds more, go on.
    """
    running = [tenant for tenant, queue in queues.items() if queue.running]
    tenant = max(running, key=lambda each: pages.used[each] + (each == asks))
    return queues[tenant].running[-1]


def victims_for_pages(
    queues: Mapping[str, TenantQueue], pages: Pages, asks: str, wanted: int, missing: int
) -> list[SequenceState] | None:
    """Return who gives way so that a waiting sequence gets `wanted` pages, `missing` of them still missing.

    None if there are not enough that would have to.
    """
    used = {tenant: pages.used[tenant] for tenant in queues if tenant != asks}
    left = {tenant: list(queues[tenant].running) for tenant in used}
    victims: list[SequenceState] = []
    while missing > 0:
        tenant = max((each for each in used if left[each]), key=used.__getitem__, default=None)
        if tenant is None:
            return None
        victim = left[tenant].pop()
        freed = sum(map(pages.is_available_without, victim.pages))
        keeps_enough = used[tenant] - freed >= pages.used[asks] + wanted
        if keeps_enough or (not queues[asks].running and had_lease(victim)):
            victims.append(victim)
            used[tenant] -= freed
            missing -= freed
    return victims


def victims_for_weights(
    queues: Mapping[str, TenantQueue],
    asks: str,
    candidates: frozenset[str],
    fits_without: Callable[[Collection[str]], bool],
) -> list[SequenceState] | None:
    """Return all sequences that use those weights of `candidates` that give way to others' weights.

    None if there are not enough that would have to. Where only weights that were used lately have to, and none in
    use, they do so for a tenant that runs none alone.
    """
    used = {tenant: by_weights(queue) for tenant, queue in queues.items()}
    own = len(used.pop(asks, {}))
    given_up: dict[str, list[SequenceState]] = {}
    if fits_without(given_up):
        return None if own else []
    while not fits_without(given_up):
        found = _next_to_give_up(used, own, candidates)
        if found is None:
            return None
        tenant, key = found
        given_up[key] = used[tenant].pop(key)
    for key in list(given_up):
        if fits_without(given_up.keys() - {key}):
            del given_up[key]
    return [sequence for users in given_up.values() for sequence in users]


def _next_to_give_up(
    used: Mapping[str, Mapping[str, list[SequenceState]]], own: int, candidates: frozenset[str]
) -> tuple[str, str] | None:
    """Return the tenant that uses most weights, of those that must give some up, and which of them it began to use last."""
    for tenant in sorted(used, key=lambda each: len(used[each]), reverse=True):
        keeps_enough = len(used[tenant]) - 1 >= own + 1
        since = {
            key: users[0].age
            for key, users in used[tenant].items()
            if key in candidates and (keeps_enough or (not own and all(map(had_lease, users))))
        }
        if since:
            return tenant, max(since, key=since.__getitem__)
    return None


def by_weights(queue: TenantQueue) -> dict[str, list[SequenceState]]:
    """Group a tenant's running sequences by their weights; those of the base model have none."""
    users: dict[str, list[SequenceState]] = {}
    for sequence in queue.running:
        key = sequence.group.request.weights
        if key is not None:
            users.setdefault(key, []).append(sequence)
    return users


def had_lease(sequence: SequenceState) -> bool:
    """Return whether a sequence has generated long enough since it was admitted last."""
    lease = max(LEASE_TOKENS, sequence.length // LEASE_SHARE)
    return len(sequence.tokens) - sequence.resumed_at >= lease
