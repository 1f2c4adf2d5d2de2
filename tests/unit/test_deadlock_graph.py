"""The graph of waits against a simulation that lets everybody who runs give back what they have, in any order."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from django_sqlsem.core.modes import (
    EXCLUSIVE,
    MUTEX,
    SHARED,
    UPDATE,
    UPGRADE,
    WHOLE,
)
from django_sqlsem.deadlocks.graph import (
    Knot,
    Name,
    Slot,
    Wait,
    entangled,
    knots,
    stuck,
)

World = tuple[dict[str, Name], list[Wait]]


class Simulation:
    """Names whose slots are handed to waiters in line, as ``rows_serve`` does; whoever does not wait can leave."""

    def __init__(self, names: dict[str, Name], waits: list[Wait]) -> None:
        self.names = names
        self.waits = {wait.id: wait for wait in waits}
        self.owners: dict[str, set[str]] = {}
        for wait in waits:
            for _key, permit in wait.permits:
                self.owners.setdefault(permit, set()).add(wait.id)
        self.ends: set[frozenset[str]] = set()
        self._known: set[Any] = set()
        taken = {key: {slot.number: (slot.permit, slot.mode) for slot in name.slots} for key, name in names.items()}
        self._go(taken, frozenset(self.waits))

    def _go(self, taken: dict[str, dict[int, tuple[str, str]]], waiting: frozenset[str]) -> None:
        waiting = self._serve(taken, waiting)
        state = (frozenset((key, frozenset(slots.items())) for key, slots in taken.items()), waiting)
        if state in self._known:
            return
        self._known.add(state)
        kept = {permit for permit, owners in self.owners.items() if owners <= waiting}
        running = {permit for slots in taken.values() for permit, _ in slots.values()} - kept
        if not running:
            self.ends.add(waiting)
        for leaving in running:
            after = {
                key: {number: held for number, held in slots.items() if held[0] != leaving}
                for key, slots in taken.items()
            }
            self._go(after, waiting)

    def _serve(self, taken: dict[str, dict[int, tuple[str, str]]], waiting: frozenset[str]) -> frozenset[str]:
        left = set(waiting)
        for key, name in self.names.items():
            if name.paused:
                left -= {each for each in left if self.waits[each].key == key}  # an operator will let them in
                continue
            line = [self.waits[each] for each in left if self.waits[each].key == key]
            # Nobody can serve who wants more than there is, and it is in nobody's way.
            left -= {each.id for each in line if each.take > self._bound(each)}
            line = [each for each in line if each.id in left]
            behind = drained = False
            for wait in sorted(line, key=lambda each: (each.mode != UPGRADE, each.arrival)):
                kept_out = drained or (behind and wait.fair)
                places = None if kept_out else self._places(wait, name, taken[key], self._bound(wait))
                if places is None:
                    behind |= wait.mode != UPDATE
                    drained |= wait.mode in EXCLUSIVE
                    continue
                mode = WHOLE if wait.mode == UPGRADE else wait.mode
                taken[key] |= dict.fromkeys(places, (wait.id, mode))
                left.discard(wait.id)
        return frozenset(left)

    def _bound(self, wait: Wait) -> int:
        name = self.names[wait.key]
        return name.operator or wait.slots or name.declared

    def _places(self, wait: Wait, name: Name, taken: dict[int, tuple[str, str]], bound: int) -> list[int] | None:
        if wait.mode == UPDATE:
            return None if 0 in taken else [0]
        everything = range(1, name.declared + 1)
        if wait.mode == WHOLE:
            return None if taken else [0, *everything]
        if wait.mode == UPGRADE:
            return None if set(taken) - {0} else list(everything)
        if any(mode == WHOLE for _permit, mode in taken.values()):
            return None
        free = [number for number in range(1, bound + 1) if number not in taken]
        live = len([number for number in taken if number > 0])
        fits = len(free) >= wait.take and (name.operator is None or live + wait.take <= name.operator)
        return free[: wait.take] if fits else None


@st.composite
def worlds(draw: Any) -> World:
    keys = "abc"[: draw(st.integers(1, 3))]
    declared = {key: draw(st.integers(1, 3)) for key in keys}
    shared = {key: draw(st.booleans()) for key in keys}  # readers and writers
    agents = range(draw(st.integers(1, 5)))
    taken: dict[str, dict[int, Slot]] = {key: {} for key in keys}
    held: dict[int, dict[str, tuple[str, str]]] = {agent: {} for agent in agents}
    for agent in agents:
        for key in keys:
            kind = draw(st.sampled_from(["nothing", "nothing", SHARED, SHARED, UPDATE, WHOLE]))
            slots, permit = taken[key], f"{agent}{key}"
            if kind == SHARED and not any(slot.mode == WHOLE for slot in slots.values()):
                places = [number for number in range(1, declared[key] + 1) if number not in slots][:1]
            elif kind == UPDATE and shared[key] and 0 not in slots:
                places = [0]
            elif kind == WHOLE and not slots:
                places = list(range(declared[key] + 1))
            else:
                continue
            if places:
                taken[key] |= {number: Slot(number, permit, kind) for number in places}
                held[agent][key] = (permit, kind)
    order = draw(st.permutations(list(agents)))
    waits = []
    for agent in agents:
        free = [key for key in keys if key not in held[agent]]
        mine = [key for key, (_permit, mode) in held[agent].items() if mode == UPDATE]
        what = draw(st.sampled_from(["runs", *free, *(f"{key}+" for key in mine)]))
        if what == "runs":
            continue
        key = what[0]
        modes = [SHARED, SHARED, WHOLE] + ([UPDATE] if shared[key] else [])
        mode = UPGRADE if what.endswith("+") else draw(st.sampled_from(modes))
        permits = {(other, permit) for other, (permit, _mode) in held[agent].items()}
        # What a thread of the same task has taken is this one's too.
        others = [(name, f"{task}{name}") for task in agents for name in held[task] if name != key]
        if others and draw(st.integers(0, 2)) == 0:
            permits.add(draw(st.sampled_from(others)))
        waits.append(
            Wait(
                id=f"w{agent}",
                key=key,
                since=order[agent],
                permits=frozenset(permits),
                take=draw(st.integers(1, 3)) if mode == SHARED else 0 if mode in (WHOLE, UPGRADE) else 1,
                mode=mode,
                slots=draw(st.one_of(st.none(), st.integers(1, declared[key]))) if mode == SHARED else None,
                fair=mode != SHARED or shared[key] or draw(st.booleans()),
            )
        )
    names = {
        key: Name(
            tuple(taken[key].values()),
            declared[key],
            operator=draw(st.one_of(st.none(), st.none(), st.integers(1, declared[key]))),
            paused=draw(st.integers(0, 9)) == 0,
        )
        for key in keys
    }
    return names, waits


def crossed(*, free: int = 0, paused: bool = False) -> World:
    """Two mutexes, each held by who waits for the other; ``free``: so many slots more of one of them."""
    names = {"a": Name((Slot(1, "pa"),), 1 + free, paused=paused), "b": Name((Slot(1, "pb"),))}
    return names, [
        Wait("w1", "b", 1, frozenset({("a", "pa")})),
        Wait("w2", "a", 2, frozenset({("b", "pb")})),
    ]


def queued(*, drains: bool = True, fair: bool = True) -> World:
    """A reader that waits for the mutex of another one, which waits behind a writer for the first to leave."""
    names = {"x": Name((Slot(1, "r1"),), 3), "m": Name((Slot(1, "m2"),))}
    mode, take = (WHOLE, 0) if drains else (SHARED, 3)
    return names, [
        Wait("w1", "m", 1, frozenset({("x", "r1")})),
        Wait("w2", "x", 2, frozenset(), take=take, mode=mode),
        Wait("w3", "x", 3, frozenset({("m", "m2")}), fair=fair),
    ]


def lent() -> World:
    """Two mutexes crossed, one of which another thread of its task has too: that one is served, and gives it back."""
    names, waits = crossed()
    return names | {"c": Name(())}, [*waits, Wait("w3", "c", 3, frozenset({("b", "pb")}))]


def without(wait: Wait, waits: list[Wait]) -> list[Wait]:
    """Return the other waits, after this one has given up its place and every permit that it or its task had."""
    return [dataclasses.replace(each, permits=each.permits - wait.permits) for each in waits if each != wait]


@settings(max_examples=400, deadline=None)
@given(worlds())
@example(crossed())
@example(crossed(free=1))
@example(crossed(paused=True))
@example(queued())
@example(queued(fair=False))
@example(queued(drains=False, fair=False))
@example(lent())
def test_stuck_is_who_is_never_served_whatever_the_others_do(world: World) -> None:
    names, waits = world
    assert Simulation(names, waits).ends == {frozenset(stuck(names, waits))}


@settings(max_examples=200, deadline=None)
@given(worlds())
@example(queued())
def test_a_deadlock_ends_if_its_youngest_gives_up_and_nobody_else_keeps_it(world: World) -> None:
    names, waits = world
    found = knots(names, waits)
    blocked = stuck(names, waits)
    assert bool(found) == bool(blocked)
    for knot in found:
        inside = {wait.id for wait in knot.waits}
        assert inside <= blocked.keys()
        assert knot.closed == all(blocked[each] <= inside for each in inside)
        assert all(knot.blockers[each] == blocked[each] & inside for each in inside)
        assert knot.youngest.permits
        left = without(knot.youngest, waits)
        if knot.closed:
            assert not any(each.identity == knot.identity for each in knots(names, left))
            assert len(stuck(names, left)) < len(blocked)
    assert not found or any(knot.closed for knot in found)
    # However much is left out, breaking one after the other ends all of them.
    for _ in waits:
        closed = next((knot for knot in knots(names, waits) if knot.closed), None)
        if closed is None:
            break
        waits = without(closed.youngest, waits)
    assert not stuck(names, waits)


@settings(max_examples=200, deadline=None)
@given(worlds())
@example(queued())
def test_names_alone_tell_who_cannot_be_part_of_one(world: World) -> None:
    names, waits = world
    suspects = {wait.id for wait in entangled([wait for wait in waits if wait.permits])}
    for knot in knots(names, waits):
        assert {wait.id for wait in knot.waits if wait.permits} & suspects
        assert {wait.key for wait in knot.waits} <= {wait.key for wait in waits if wait.id in suspects}


@settings(max_examples=200, deadline=None)
@given(worlds(), st.sets(st.integers(0, 4)))
def test_who_barges_is_never_taken_for_stuck_that_would_not_be_in_line(world: World, barging: set[int]) -> None:
    names, waits = world
    line = [dataclasses.replace(wait, fair=True) for wait in waits]
    free = [dataclasses.replace(wait, fair=wait.id not in {f"w{each}" for each in barging}) for wait in waits]
    assert stuck(names, free).keys() <= stuck(names, line).keys()


def ids(knot: Knot) -> list[str]:
    return [wait.id for wait in knot.waits]


def test_the_order_goes_round_the_cycle_from_the_oldest() -> None:
    names = {key: Name((Slot(1, f"p{key}"),)) for key in "abcd"}
    waits = [
        Wait("w3", "a", 3, frozenset({("c", "pc")})),
        Wait("w1", "b", 1, frozenset({("a", "pa")})),
        Wait("w2", "c", 2, frozenset({("b", "pb")})),
        Wait("w0", "a", 0, frozenset({("d", "pd")})),  # merely behind it
    ]
    [knot] = knots(names, waits[:3])
    assert ids(knot) == ["w1", "w2", "w3"]
    assert knot.youngest.id == "w3"
    [knot] = knots(names, [*waits[1:3], dataclasses.replace(waits[0], since=0)])
    assert ids(knot) == ["w3", "w1", "w2"]
    assert stuck(names, waits).keys() == {"w0", "w1", "w2", "w3"}


def test_two_deadlocks_are_told_apart_and_the_one_behind_the_other_is_not_closed() -> None:
    names = {key: Name((Slot(1, f"p{key}"),)) for key in "abd"} | {"c": Name((Slot(1, "pc"), Slot(2, "pc2")), 2)}
    waits = [
        Wait("w1", "b", 1, frozenset({("a", "pa")})),
        Wait("w2", "a", 2, frozenset({("b", "pb"), ("c", "pc")})),
        Wait("w3", "c", 3, frozenset({("d", "pd")})),
        Wait("w4", "d", 4, frozenset({("c", "pc2")})),
    ]
    first, second = knots(names, waits)
    assert (ids(first), first.closed) == (["w1", "w2"], True)
    assert (ids(second), second.closed) == (["w3", "w4"], False)


def test_a_mutex_waits_for_all_slots_and_a_semaphore_for_it() -> None:
    others = {"b": Name((Slot(1, "pb"),))}
    after = Wait("w2", "b", 2, frozenset({("a", "pa")}))
    behind = {"a": Name((Slot(2, "pa"),), 3)} | others
    mutex = Wait("w1", "a", 1, frozenset({("b", "pb")}), mode=MUTEX, slots=1)
    assert ids(knots(behind, [mutex, after])[0]) == ["w1", "w2"]
    assert knots(behind, [dataclasses.replace(mutex, mode=SHARED), after]) == []
    taken = {"a": Name((Slot(1, "pa", MUTEX),), 3)} | others
    assert ids(knots(taken, [dataclasses.replace(mutex, mode=SHARED, slots=3), after])[0]) == ["w1", "w2"]


def test_a_thousand_waits_are_judged_in_good_time() -> None:
    names = {f"n{each}": Name((Slot(1, f"p{each}"),)) for each in range(1000)}
    waits = [
        Wait(f"w{each}", f"n{(each + 1) % 1000}", each, frozenset({(f"n{each}", f"p{each}")})) for each in range(1000)
    ]
    [knot] = knots(names, waits)
    assert len(knot.waits) == 1000
