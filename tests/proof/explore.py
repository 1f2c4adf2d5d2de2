"""Every way in which the statements of some clients can follow one another, and what must hold after each step.

A *schedule* is a list of choices: which client goes next, and what happens to it. The way to a state is run again from
the beginning for each choice that is left there. Two schedules that have led to the same rows, with clients that have
seen the same, go on in the same ways: so each state is gone on from once.
"""

from __future__ import annotations

import abc
import copy
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from django_sqlsem.backends.base import Acquired
from tests.proof import clients
from tests.proof.clients import AGAIN, BUSY, CRASH, GO, LOST, UNHEARD, Client
from tests.proof.operations import Scenario
from tests.proof.world import NAME, Seen, World, held_by, permit_of, place, request

#: Which client takes a step, and what it is told.
Choice = tuple[int, str]


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Window:
    """What has been so since a client's operation began, or at least once."""

    line: tuple[tuple[str, int], ...] = ()
    bound: int = 0
    unpaused: bool = False


@dataclass
class Judge:
    """Compares what is seen after a step with what was seen before, as a user would who knows what was promised."""

    seen: Seen
    windows: dict[int, Window] = field(default_factory=dict)
    #: Of each client that looks later, whose operations it waits for.
    awaited: dict[int, set[int]] = field(default_factory=dict)
    #: Of each client that has changed something or waits for a row, what its statements may have seen.
    saw: dict[int, int] = field(default_factory=dict)

    def begins(self, number: int) -> None:
        """An operation is about to send its first statement."""
        self.windows[number] = Window(self.seen.waiters, self.seen.bound, not self.seen.paused)

    def step(self, number: int, seen: Seen) -> None:
        """Judge what one client's step has changed."""
        before, self.seen = self.seen, seen
        for each in self.windows.values():
            each.line = tuple(waiter for waiter in each.line if waiter in seen.waiters)
            each.bound = max(each.bound, seen.bound)
            each.unpaused = each.unpaused or not seen.paused
        window = self.windows.get(number, Window())
        known = {row["slot"]: row for row in before.slots}
        for row in seen.slots:
            slot, old = row["slot"], known.get(row["slot"], {"permit_id": None, "token": -1})
            hold(row["token"] >= old["token"], f"the token of slot {slot} went back")
            if row["permit_id"] not in (None, old["permit_id"]):
                hold(row["token"] > old["token"], f"slot {slot} was granted anew under its old token")
                self._judge_grant(row["permit_id"], before, window)
        live = len(seen.live)
        if live > len(before.live):
            hold(live <= window.bound, f"{live} permits are live of {window.bound} slots: {sorted(seen.permits)}")

    def _judge_grant(self, permit: str, before: Seen, window: Window) -> None:
        hold(window.unpaused, f"{permit} was granted while the name was paused")
        line = [ticket for ticket, _ in before.waiters]
        before_it = line[: line.index(permit)] if permit in line else line
        passed = [ticket for ticket, take in window.line if ticket in before_it and take <= self.seen.bound]
        hold(not passed, f"{permit} was served before {passed}, who had waited longer")


def hold(condition: bool, what: str) -> None:
    """Raise ``BrokenError`` unless something is so."""
    if not condition:
        raise BrokenError(what)


@dataclass
class Findings:
    """What came of one exploration."""

    scenario: Scenario
    states: int = 0
    steps: int = 0
    runs: int = 0
    schedules: int = 0
    exhausted: bool = True
    broken: str = ""
    schedule: list[Choice] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = "all" if self.exhausted else "some"
        text = f"{self.scenario}: {how} {self.schedules} schedules, {self.states} states, {self.runs} runs"
        if self.broken:
            text += f"\n{self.broken}\nreplay: {self.scenario.names!r} {self.scenario.base!r} {self.schedule!r}\n"
            text += "\n".join(self.trace)
        return text


def schedules(root: Any, visited: dict[Any, list[Any]]) -> int:
    """Count the schedules that lead from the first state to an end; ``visited`` tells which states follow each."""
    counts: dict[Any, int] = {}
    for key in reversed(list(_in_order(root, visited))):
        nexts = visited.get(key, [])
        counts[key] = sum(counts.get(each, 0) for each in nexts) if nexts else 1
    return counts.get(root, 0)


def _in_order(root: Any, visited: dict[Any, list[Any]]) -> Iterator[Any]:
    incoming: dict[Any, int] = {}
    for nexts in visited.values():
        for each in nexts:
            incoming[each] = incoming.get(each, 0) + 1
    ready = [root]
    while ready:
        key = ready.pop()
        yield key
        for each in visited.get(key, []):
            incoming[each] -= 1
            if not incoming[each]:
                ready.append(each)


J = TypeVar("J")


class Search(abc.ABC, Generic[J]):
    """Goes through all schedules of a scenario; ``J`` judges their steps."""

    def search(self, found: Findings, until: float, order: random.Random | None = None) -> Findings:
        """Run all schedules, or those that there is time for before the instant ``until``. ``order`` shuffles them."""
        self._visited: dict[Any, list[Any]] = {}
        self._ends: set[Any] = set()
        self._root: Any = None
        left: list[tuple[list[Choice], J | None]] = [([], None)]
        while left:
            if until and time.monotonic() > until:
                found.exhausted = False
                break
            if order is not None:  # another place to go on from each time
                index = order.randrange(len(left))
                left[index], left[-1] = left[-1], left[index]
            prefix, judge = left.pop()
            found.runs += 1
            try:
                self._run(prefix, judge, left, found)
            except BrokenError as error:
                found.broken, found.exhausted = str(error), False
                break
            finally:
                self._drain()
        found.states = len(self._visited)
        found.schedules = schedules(self._root, self._visited)
        return found

    def _run(self, prefix: list[Choice], known: J | None, left: list[Any], found: Findings) -> None:
        self._start()
        judge = self._judge_of_beginning() if known is None else known
        for choice in prefix[:-1]:
            self._go(choice, None)
        chosen, parent = list(prefix), None
        found.schedule = chosen
        if prefix:
            parent = self._key(judge, prefix[:-1])
            self._check_the_way(judge, prefix[:-1])
            self._go(prefix[-1], judge)
        while True:
            found.steps += 1
            self._follow_up(judge, chosen)
            key = self._key(judge, chosen)
            if parent is None:
                self._root = key
            else:
                self._visited[parent].append(key)
            if key in self._visited:
                return
            self._visited[key] = []
            choices = list(self._choices(judge, chosen))
            if not choices:
                self._end(judge, chosen)
                return
            left += [([*chosen, choice], copy.deepcopy(judge)) for choice in choices[1:]]
            chosen.append(choices[0])
            self._go(choices[0], judge)
            parent = key

    @abc.abstractmethod
    def _start(self) -> None:
        """Have all clients stop before their first steps, at the beginning of the scenario."""

    @abc.abstractmethod
    def _judge_of_beginning(self) -> J:
        """Return who judges the steps from the beginning on."""

    @abc.abstractmethod
    def _go(self, choice: Choice, judge: J | None) -> None:
        """Take a step, and have it judged, unless it was before."""

    @abc.abstractmethod
    def _check_the_way(self, judge: J, chosen: Sequence[Choice]) -> None:
        """Assert that a schedule that is run again has led to where it led before."""

    def _follow_up(self, judge: J, chosen: list[Choice]) -> None:
        """Take the steps that nobody chooses."""

    @abc.abstractmethod
    def _key(self, judge: J, chosen: Sequence[Choice]) -> Any:
        """Return what tells a state from others."""

    @abc.abstractmethod
    def _choices(self, judge: J, chosen: Sequence[Choice]) -> Iterator[Choice]:
        """Yield what may come next."""

    @abc.abstractmethod
    def _end(self, judge: J, chosen: list[Choice]) -> None:
        """Judge the end of a schedule."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """Have all clients come to their ends, so that the next run can begin."""


class Explorer(Search[Judge]):
    """Runs scenarios on one database."""

    def __init__(self, world: World, most: int = 3) -> None:
        self.world = world
        self._monitor = clients.monitor_of(world.alias)
        self._all = [Client(number, world.alias, self._monitor) for number in range(most)]

    def close(self) -> None:
        for client in self._all:
            client.start(None)
        if self._monitor is not None:
            self._monitor.close()

    def explore(self, scenario: Scenario, *, faults: int = 0, until: float = 0.0, seed: int | None = None) -> Findings:
        """Run all schedules of at most so many ``faults``, or those that there is time for before ``until``."""
        self._begin(scenario, faults)
        found = self.search(Findings(scenario), until, random.Random(seed) if seed is not None else None)
        if found.broken:
            self._shrink(found)
        return found

    def replay(
        self, scenario: Scenario, schedule: Sequence[Choice], faults: int = 9
    ) -> tuple[str, list[Choice], list[str]]:
        """Run one schedule, then each client to its end. Return what broke, what was chosen, and in words."""
        self._begin(scenario, faults)
        self._ends = set()  # the search has judged this one
        self._start()
        judge, chosen, trace = self._judge_of_beginning(), [], []
        wanted = list(schedule)
        try:
            while choices := list(self._choices(judge, chosen)):
                choice = choices[0]
                while wanted:
                    first = wanted.pop(0)
                    if first in choices:
                        choice = first
                        break
                number, word = choice
                trace.append(
                    f"{self._names[number]} #{number} {word}: {self._clients[number].text[:150] or 'looks again'}"
                )
                chosen.append(choice)
                self._go(choice, judge)
            self._end(judge, chosen)
        except BrokenError as error:
            self._drain()
            return str(error), chosen, trace
        return "", chosen, trace

    # One run.

    def _begin(self, scenario: Scenario, faults: int) -> None:
        self._scenario, self._faults = scenario, faults
        self._names = scenario.names
        self._clients = self._all[: len(scenario.names)]
        self._script = self.world.script(scenario.base)

    def _start(self) -> None:
        self.world.reset(self._script)
        pairs = zip(self._clients, self._scenario.operations, self._scenario.subjects, strict=True)
        for client, operation, subject in pairs:
            client.start(lambda client, run=operation.program, subject=subject: run(self.world, client, subject))

    def _judge_of_beginning(self) -> Judge:
        return Judge(self.world.read())

    def _go(self, choice: Choice, judge: Judge | None) -> None:
        self._take(choice, judge)
        if judge is not None:
            self._judge(choice[0], judge)

    def _check_the_way(self, judge: Judge, chosen: Sequence[Choice]) -> None:
        where = self._key(judge, chosen)
        assert where in self._visited, f"the same schedule has led elsewhere: {self._names!r} {chosen}"

    def _choices(self, judge: Judge, chosen: Sequence[Choice]) -> Iterator[Choice]:
        """Yield what may come next: steps first, then what may go wrong."""
        stopped = [client for client in self._clients if self._may_go(client, judge)]
        yield from ((client.number, GO) for client in stopped)
        if sum(word != GO for _, word in chosen) >= self._faults:
            return
        for client in stopped:
            yield client.number, CRASH
            if self.world.postgresql and client.kind not in (clients.LOOK, AGAIN):
                yield client.number, LOST
                if client.kind == clients.COMMIT:
                    yield client.number, UNHEARD
            elif client.kind in (clients.WRITE, clients.BEGIN):
                yield client.number, BUSY

    def _may_go(self, client: Client, judge: Judge | None) -> bool:
        if client.state != "stopped" or client.blocked:
            return False
        if client.kind == clients.LOOK:
            return judge is None or not judge.awaited[client.number]
        if client.kind == AGAIN:
            others = [other for other in self._clients if other is not client]
            return client.passed or all(other.state in ("done", "dead") or other.kind == AGAIN for other in others)
        writes = client.kind in (clients.WRITE, clients.BEGIN)
        others = any(other.open for other in self._clients if other is not client)
        return self.world.postgresql or not (writes and others)

    def _take(self, choice: Choice, judge: Judge | None) -> None:
        number, word = choice
        client = self._clients[number]
        if judge is not None:
            if client.fresh:
                judge.begins(number)
            if client.kind in (clients.WRITE, clients.BEGIN):
                judge.saw[number] = hash((judge.saw.get(number), judge.seen.key))
        client.step(word)
        for other in self._clients:
            other.passed = other.passed or other is not client
            if other.blocked:  # it may go on if this one has ended its transaction
                other.arrive()
                if judge is not None and not other.blocked:
                    judge.saw[other.number] = hash((judge.saw.get(other.number), number, self.world.read().key))

    def _judge(self, number: int, judge: Judge) -> None:
        judge.step(number, self.world.read())
        under_way = {each.number for each in self._clients if each.mid and not each.fresh}
        for client in self._clients:
            if client.error is not None:
                raise BrokenError(f"{self._names[client.number]} failed: {client.error!r}") from client.error
            if client.number not in under_way:
                judge.windows.pop(client.number, None)
            if not client.open and not client.blocked:
                judge.saw.pop(client.number, None)
            if client.kind == clients.LOOK and client.state == "stopped":
                judge.awaited[client.number] = judge.awaited.get(client.number, under_way) & under_way
            else:
                judge.awaited.pop(client.number, None)
            if client.holds is not None and client.state != "dead":
                self._stands(client.holds.permit_id, judge.seen)
        if not any(operation.takes for operation in self._scenario.operations):
            for permit in self._kept:
                self._stands(permit, judge.seen)

    @staticmethod
    def _stands(permit: str, seen: Seen) -> None:
        hold(permit in seen.permits, f"{permit} is held, and its slot was given away")

    @property
    def _kept(self) -> list[str]:
        """The permits of the beginning that nobody gives back."""
        base, needs = self._scenario.base, [operation.needs for operation in self._scenario.operations]
        return [permit_of("holder", each) for each in range(needs.count("holder"), base.held - base.expired)]

    def _key(self, judge: Judge, chosen: Sequence[Choice]) -> Any:
        each = [
            (c.state, c.blocked, c.passed and c.kind == AGAIN, c.kind, c.text, c.open, c.mid, c.fresh, c.history)
            for c in self._clients
        ]
        told = repr((each, judge.windows, judge.awaited, judge.saw))
        return judge.seen.key, hash(told), sum(word != GO for _, word in chosen)

    def _drain(self) -> None:
        while left := [client for client in self._clients if client.state not in ("done", "dead")]:
            ready = [client for client in left if not client.blocked]
            may = [client for client in ready if self._may_go(client, None)]
            if ready:
                self._take(((may or ready)[0].number, GO if may else CRASH), None)
            else:  # they wait for each other, and the database ends that
                left[0].arrive()

    def _shrink(self, found: Findings) -> None:
        """Leave out choices, one after the other, as long as the same thing breaks."""
        best = list(found.schedule)
        index = 0
        while index < len(best):
            shorter = best[:index] + best[index + 1 :]
            broken, chosen, _ = self.replay(self._scenario, shorter, self._faults)
            if broken[:30] == found.broken[:30] and _weight(chosen) < _weight(best):
                best = chosen
            else:
                index += 1
        broken, found.schedule, found.trace = self.replay(self._scenario, best, self._faults)
        found.broken = broken or f"{found.broken} (but not when it was run again)"

    # The end of a run.

    def _end(self, judge: Judge, chosen: Sequence[Choice]) -> None:
        """What must hold when all clients have ended, and after a heartbeat of each waiter; nothing may stay."""
        stuck = [client.number for client in self._clients if client.state not in ("done", "dead")]
        if stuck:
            raise BrokenError(f"clients {stuck} wait for each other")
        waits = {
            client.waits.permit_id: (client.waits, place(client.number)) for client in self._clients if client.waits
        }
        base, seen = self._scenario.base, judge.seen
        needs = [operation.needs for operation in self._scenario.operations]
        for number in range(needs.count("line"), base.line):
            waits[permit_of("line", number)] = (request(permit_of("line", number)), place(0))
        holds = [client.holds for client in self._clients if client.holds is not None and client.state != "dead"]
        good = all(word == GO for _, word in chosen)
        key = (seen.key, repr(waits), repr(holds), good)
        if key in self._ends:
            return
        self._ends.add(key)
        told = not any(operation.untold for operation in self._scenario.operations) and not base.expired
        if good:
            kept = {permit_of("holder", number) for number in range(needs.count("holder"), base.held)}
            lost = seen.permits - kept - set(waits) - {each.permit_id for each in holds}
            hold(not lost, f"{sorted(lost)} are live, and nobody has them")
            hold(not (told and seen.idle_slot), f"a slot is free, and {seen.waiters} wait for a heartbeat")
        self._settle(waits, holds)

    def _settle(self, waits: dict[str, Any], holds: list[Acquired]) -> None:
        world, backend = self.world, self.world.backend
        holds = holds + [held_by(number) for number in range(self._scenario.base.held)]
        for _ in range(4 + 2 * len(waits)):
            for permit, (wanted, where) in sorted(waits.items()):
                granted = backend.wait(world.session, wanted, where).granted
                got = granted[0] if granted else backend.granted(world.session, wanted)
                if got is not None:
                    holds.append(Acquired(wanted, got.grant))
                    del waits[permit]
                elif wanted.take > world.read().bound:  # an operator's act leaves less than it wants, for good
                    backend.leave(world.session, wanted)
                    del waits[permit]
            seen = world.read()
            hold(not (waits and seen.idle_slot), f"a slot is free, and {seen.waiters} wait after a heartbeat of each")
            if seen.paused:
                backend.set_paused(NAME, False)
            while holds:
                backend.release(world.session, holds.pop(), wanted=True)
            # The dead: their leases run out, and the patience with those of them that wait.
            alive = set(waits)
            world.run_out([permit for permit in _everybody(seen) if permit not in alive])
            seen = world.read()
            if not (waits or seen.live or seen.line):
                return
        hold(not waits, f"{sorted(waits)} are never served")
        hold(not seen.live and not seen.line, f"something is left at the end: {seen}")


def _everybody(seen: Seen) -> list[str]:
    return [*seen.permits, *(ticket for ticket, _ in seen.waiters)]


def _weight(schedule: Sequence[Choice]) -> tuple[int, int, int]:
    """How hard a schedule is to read: faults, changes from one client to another, and steps."""
    faults = sum(word != GO for _, word in schedule)
    changes = sum(one[0] != two[0] for one, two in itertools.pairwise(schedule))
    return faults, changes, len(schedule)
