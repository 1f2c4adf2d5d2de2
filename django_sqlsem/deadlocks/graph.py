"""The graph of waits, reduced: who can still be served if all who do not wait give back what they have.

Nothing here reads a database or a clock. A name is a number of slots with holders. Who waits for it gets slots as they
become free, in the order in which the waiters came; who has them gives them back once its own wait has ended. What is
left when nobody more can be served is deadlocked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from django_sqlsem.core.modes import EXCLUSIVE, MUTEX, SHARED, UPDATE, UPGRADE, WHOLE, WRITER


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that is taken, and by which permit."""

    number: int
    permit: str
    mode: str = SHARED


@dataclass(frozen=True, slots=True)
class Name:
    """One lock: what is taken of it, and how much there is."""

    slots: tuple[Slot, ...]
    declared: int = 1
    operator: int | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """One thread or task that waits for the name ``key``, and the permits, by name, that it holds meanwhile."""

    id: str
    key: str
    since: int
    permits: frozenset[tuple[str, str]] = frozenset()
    take: int = 1
    mode: str = SHARED
    #: Its own number of slots; ``None``: as declared.
    slots: int | None = None
    fair: bool = True

    @property
    def arrival(self) -> tuple[int, str]:
        """Its place among the waiters."""
        return self.since, self.id


@dataclass(frozen=True, slots=True)
class Knot:
    """Waits of which none can end before another one of them has ended, in order round a cycle."""

    waits: tuple[Wait, ...]
    #: Whom each waits for, by wait id.
    blockers: Mapping[str, frozenset[str]]
    #: Whether nobody else keeps them: then it is undone if one of them gives up.
    closed: bool

    @property
    def youngest(self) -> Wait:
        """The wait that began last, of those who hold something."""
        return max((wait for wait in self.waits if wait.permits), key=lambda wait: wait.arrival)

    @property
    def identity(self) -> frozenset[tuple[str, frozenset[tuple[str, str]]]]:
        """What is the same as long as it is the same deadlock: who waits, and with what."""
        return frozenset((wait.id, wait.permits) for wait in self.waits)


_Blockers: TypeAlias = dict[str, frozenset[str]]


def entangled(waits: Iterable[Wait]) -> list[Wait]:
    """Return the waits that may be part of a cycle as far as names tell: usually none, and then nothing more is read.

    Each of them waits for a name of which another one holds something, and holds something of a name waited for.
    """
    left = list(waits)
    while True:
        held = {key for wait in left for key, _permit in wait.permits}
        wanted = {wait.key for wait in left}
        keep = [wait for wait in left if wait.key in held and any(key in wanted for key, _permit in wait.permits)]
        if len(keep) == len(left):
            return keep if len(keep) > 1 else []
        left = keep


def stuck(names: Mapping[str, Name], waits: Sequence[Wait]) -> _Blockers:
    """Return the waits that can never end by themselves, by id, each with those of them that keep it."""
    owners: dict[str, set[str]] = {}
    for wait in waits:
        for _key, permit in wait.permits:
            owners.setdefault(permit, set()).add(wait.id)
    left = {wait.id: wait for wait in waits}
    while True:
        blockers = {wait.id: _blockers(wait, names.get(wait.key), left, owners) for wait in left.values()}
        served = [wait_id for wait_id, found in blockers.items() if not found]
        if not served:
            return blockers
        for wait_id in served:
            del left[wait_id]


def knots(names: Mapping[str, Name], waits: Sequence[Wait]) -> list[Knot]:
    """Return the deadlocks among these waits. Who merely waits behind one is not part of it."""
    blockers = stuck(names, waits)
    known = {wait.id: wait for wait in waits}
    found = []
    for part in _components(blockers, waits):
        edges = {wait_id: blockers[wait_id] & part for wait_id in part}
        closed = all(blockers[wait_id] <= part for wait_id in part)
        found.append(Knot(_round([known[wait_id] for wait_id in part], edges), edges, closed))
    return sorted(found, key=lambda knot: knot.waits[0].arrival)


def _blockers(
    wait: Wait, name: Name | None, left: Mapping[str, Wait], owners: Mapping[str, AbstractSet[str]]
) -> frozenset[str]:
    """Return which of those who are ``left`` keep this one from being served; empty: nobody does."""
    if name is None or name.paused or wait.take > _bound(wait, name):
        return frozenset()  # it waits for an operator
    mine = {permit for _key, permit in wait.permits}
    # What threads of one task share, any of them may give back.
    kept = [slot for slot in name.slots if slot.permit in owners and owners[slot.permit] <= left.keys()]
    found = {owner for slot in _in_the_way(wait, name, kept, mine) for owner in owners[slot.permit]}
    return frozenset(found | {other.id for other in left.values() if _is_ahead(other, wait)})


def _in_the_way(wait: Wait, name: Name, kept: list[Slot], mine: AbstractSet[str]) -> list[Slot]:
    """Return which slots that are not given back keep the wait from what it wants."""
    if wait.mode in (WHOLE, MUTEX):
        return kept
    if wait.mode == UPGRADE:
        return [slot for slot in kept if slot.number != WRITER and slot.permit not in mine]
    alone = [slot for slot in kept if slot.mode in (WHOLE, MUTEX)]
    if wait.mode == UPDATE:
        return alone + [slot for slot in kept if slot.number == WRITER]
    if alone:
        return alone
    bound = _bound(wait, name)
    # After an operator has taken slots away, those above count until they are given back.
    taken = [slot for slot in kept if slot.number != WRITER and (name.operator is not None or slot.number <= bound)]
    return taken if bound - len(taken) < wait.take else []


def _bound(wait: Wait, name: Name) -> int:
    """Return how many slots count: the operator's number, else the claim's own, else the declared one."""
    return next(each for each in (name.operator, wait.slots, name.declared) if each is not None)


def _is_ahead(other: Wait, wait: Wait) -> bool:
    """Whether nobody serves ``wait`` before ``other``."""
    if other.key != wait.key or other.id == wait.id or other.mode == UPDATE or wait.mode == UPGRADE:
        return False
    if not wait.fair and other.mode not in EXCLUSIVE:
        return False
    return other.mode == UPGRADE or other.arrival < wait.arrival


def _components(edges: _Blockers, waits: Iterable[Wait]) -> Iterator[frozenset[str]]:
    """Yield the groups in which all wait for each other, by way of others perhaps, and some of them hold something."""
    back: dict[str, set[str]] = {wait_id: set() for wait_id in edges}
    for wait_id, others in edges.items():
        for other in others:
            back[other].add(wait_id)
    left = {wait.id for wait in waits if wait.permits and wait.id in edges}
    while left:
        wait_id = left.pop()
        part = frozenset(_reached(wait_id, edges) & _reached(wait_id, back))
        left -= part
        if part:
            yield part


def _reached(wait_id: str, edges: Mapping[str, AbstractSet[str]]) -> set[str]:
    """Return all to whom these edges lead from a wait, directly or by way of others."""
    found: set[str] = set()
    line = [wait_id]
    while line:
        new = edges[line.pop()] - found
        found |= new
        line += new
    return found


def _round(waits: Sequence[Wait], edges: Mapping[str, AbstractSet[str]]) -> tuple[Wait, ...]:
    """Return the waits in order: a shortest cycle from the oldest that holds something, then the others."""
    known = {wait.id: wait for wait in waits}
    start = min((wait for wait in waits if wait.permits), key=lambda wait: wait.arrival).id
    seen: set[str] = set()
    paths: deque[tuple[str, ...]] = deque([(start,)])
    while paths:
        path = paths.popleft()
        if start in edges[path[-1]]:
            rest = sorted(edges.keys() - set(path), key=lambda each: known[each].arrival)
            return tuple(known[each] for each in (*path, *rest))
        for other in sorted(edges[path[-1]] - seen):
            seen.add(other)
            paths.append((*path, other))
    raise AssertionError("every wait of a group is on a cycle")
