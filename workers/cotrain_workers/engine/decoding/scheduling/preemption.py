"""Choice of the sequences to preempt: the youngest of the tenant with the most memory. Pure.

A waiting sequence may preempt only a tenant that afterwards has at least as much as the waiting tenant. Two
tenants therefore never preempt each other in turn. A tenant without running sequences may also preempt a
sequence whose lease has expired: it has generated at least `LEASE_TOKENS` since its last admission.
"""

from collections.abc import Callable, Collection, Mapping

from cotrain_workers.engine.decoding.scheduling.pages import Pages
from cotrain_workers.engine.decoding.sequence import SequenceState, TenantQueue

#: Tokens that an admitted sequence may generate before a tenant without running sequences can preempt it. A
#: long one may generate 1 / LEASE_SHARE of its length, because all its tokens are recomputed.
LEASE_TOKENS, LEASE_SHARE = 256, 8


def largest_holder(queues: Mapping[str, TenantQueue], pages: Pages, asks: str) -> SequenceState:
    """Return the sequence to preempt when a running sequence of tenant `asks` needs another page.

    It may be the sequence itself; the others, none of which holds more, then continue.
    """
    running = [tenant for tenant, queue in queues.items() if queue.running]
    tenant = max(running, key=lambda each: pages.used[each] + (each == asks))
    return queues[tenant].running[-1]


def victims_for_pages(
    queues: Mapping[str, TenantQueue], pages: Pages, asks: str, wanted: int, missing: int
) -> list[SequenceState] | None:
    """Return the sequences to preempt so that a waiting one gets `wanted` pages, of which `missing` are not free.

    None if preemption cannot free enough pages.
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
    """Return every sequence that uses weights of `candidates` that must be released for other weights.

    None if not enough weights can be released. An empty list means that only weights used recently must be
    released; this is allowed only for a tenant that has none in use.
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
    """Return the tenant and the weights to release: the newest in use of the largest eligible tenant."""
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
    """Group a tenant's running sequences by weights, without those of the base model alone."""
    users: dict[str, list[SequenceState]] = {}
    for sequence in queue.running:
        key = sequence.group.request.weights
        if key is not None:
            users.setdefault(key, []).append(sequence)
    return users


def had_lease(sequence: SequenceState) -> bool:
    """Return True if the lease of a sequence has expired since its last admission."""
    lease = max(LEASE_TOKENS, sequence.length // LEASE_SHARE)
    return len(sequence.tokens) - sequence.resumed_at >= lease
