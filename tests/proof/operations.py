"""What clients do: the library's operations, and after a failure what the keeper does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django_sqlsem.backends.base import Acquired, Request, Waited
from django_sqlsem.exceptions import BackendError, SemaphoreError
from tests.proof.clients import Client
from tests.proof.world import (
    NAME,
    NOW,
    RESOURCE,
    Base,
    World,
    held_by,
    permit_of,
    place,
    process_of,
    request,
)


@dataclass(frozen=True)
class Operation:
    """A kind of client, and what must be there for it: ``needs`` a ``holder`` or one in ``line`` of its own."""

    program: Callable[[World, Client, int], None]
    needs: str = ""
    #: Whether it may cost the first holder its slot, or the last ones when slots become fewer.
    takes: bool = False
    #: Whether a waiter learns of what it has made free only by its own clock.
    untold: bool = False


def _acquire(world: World, client: Client, _subject: int, *, take: int = 1) -> None:
    backend, attempt = world.backend, 0
    while True:
        wanted = request(permit_of("client", client.number, attempt), take=take)
        client.process = process_of(wanted.permit_id)
        attempt += 1
        try:
            waited = client.call(backend.enrol, client.session, wanted, place(client.number), first=attempt == 1)
            if waited.queue is not None and not waited.granted:
                waited = second_look(world, client, wanted)
        except SemaphoreError as error:  # or an operator's act leaves less than it wants
            client.call(backend.discard, client.session, RESOURCE, wanted.permit_id)
            if getattr(error, "stale_connection", False):
                continue
            return
        for granted in waited.granted:
            if granted.permit_id == wanted.permit_id:
                client.holds = Acquired(wanted, granted.grant)
                return
        if waited.queue is not None:
            client.waits = wanted
            return
        client.call(backend.discard, client.session, RESOURCE, wanted.permit_id)


def second_look(world: World, client: Client, wanted: Request) -> Waited:
    """What ``runtime.queue`` does 25 ms after a place was taken."""
    client.look_later()
    return client.call(world.backend.wait, client.session, wanted, place(client.number))


def _acquire_two(world: World, client: Client, subject: int) -> None:
    _acquire(world, client, subject, take=2)


def _try(world: World, client: Client, _subject: int) -> None:
    attempt = 0
    while True:
        wanted = request(permit_of("client", client.number, attempt))
        client.process = process_of(wanted.permit_id)
        attempt += 1
        try:
            grant = client.call(world.backend.claim, client.session, wanted)
        except BackendError as error:
            client.call(world.backend.discard, client.session, RESOURCE, wanted.permit_id)
            if error.stale_connection:
                continue
            return
        if grant is not None:
            client.holds = Acquired(wanted, grant)
        return


def _release(world: World, client: Client, subject: int, *, wanted: bool = False) -> None:
    held = held_by(subject)
    client.process = process_of(held.permit_id)
    _until_done(client, lambda: client.call(world.backend.release, client.session, held, wanted=wanted))


def _hand_over(world: World, client: Client, subject: int) -> None:
    _release(world, client, subject, wanted=True)


def _renew(world: World, client: Client, subject: int) -> None:
    held = held_by(subject)
    _until_done(client, lambda: client.call(world.backend.renew, client.session, [held]))


def _give_up(world: World, client: Client, subject: int) -> None:
    wanted = request(permit_of("line", subject))
    client.process = process_of(wanted.permit_id)
    try:
        client.call(world.backend.leave, client.session, wanted)
    except BackendError:
        client.call(world.backend.discard, client.session, RESOURCE, wanted.permit_id)


def _heartbeat(world: World, client: Client, subject: int) -> None:
    wanted = request(permit_of("line", subject))
    client.process = process_of(wanted.permit_id)
    try:
        client.call(world.backend.wait, client.session, wanted, place(0))
    except BackendError:
        client.call(world.backend.discard, client.session, RESOURCE, wanted.permit_id)
    else:
        client.waits = wanted


def _expire(world: World, client: Client, _subject: int) -> None:
    text = f"UPDATE sqlsem_slot SET expires_us = {NOW - 1} WHERE permit_id = '{permit_of('holder', 0)}'"
    _until_done(client, lambda: client.call(client.session.run, lambda cursor: cursor.execute(text)))


def _housekeeping(world: World, client: Client, _subject: int) -> None:
    _until_done(client, lambda: client.call(world.backend.free_dead, client.session, RESOURCE, witness=False))


def _by_operator(act: Callable[[Any], Any]) -> Callable[[World, Client, int], None]:
    def program(world: World, client: Client, _subject: int) -> None:
        _until_done(client, lambda: client.call(act, world.backend))

    return program


def _until_done(client: Client, act: Callable[[], object]) -> None:
    try:
        act()
    except BackendError:
        act()


def _resize(change: int, **how_long: float) -> Callable[[World, Client, int], None]:
    def program(world: World, client: Client, _subject: int) -> None:
        _until_done(client, lambda: client.call(world.backend.set_slots, NAME, 2 + change, **how_long))

    return program


_FIRST: Final = (NAME, 1, 1)
OPERATIONS: Final = {
    "acquire": Operation(_acquire),
    "acquire two": Operation(_acquire_two),
    "try": Operation(_try),
    "release": Operation(_release, "holder"),
    "hand over": Operation(_hand_over, "holder"),
    "give up": Operation(_give_up, "line"),
    "heartbeat": Operation(_heartbeat, "line"),
    "renew": Operation(_renew),
    "expire": Operation(_expire, takes=True, untold=True),
    "housekeeping": Operation(_housekeeping, takes=True),
    "shrink": Operation(_resize(-1)),
    "grow": Operation(_resize(1)),
    # For a time that is over at once, so that anybody may be the one who ends it.
    "shrink for a time": Operation(_resize(-1, seconds=0.0)),
    "grow for a time": Operation(_resize(1, seconds=0.0)),
    "pause": Operation(_by_operator(lambda backend: backend.set_paused(NAME, True))),
    "resume": Operation(_by_operator(lambda backend: backend.set_paused(NAME, False))),
    "revoke": Operation(_by_operator(lambda backend: backend.revoke(*_FIRST, by="operator")), takes=True),
    "purge slot": Operation(_by_operator(lambda backend: backend.purge_slot(*_FIRST))),
    "purge name": Operation(_by_operator(lambda backend: backend.purge_idle(NAME))),
}


@dataclass(frozen=True)
class Scenario:
    """Operations at once, each by a client of its own, and what there is when they begin."""

    names: tuple[str, ...]
    base: Base

    @property
    def operations(self) -> list[Operation]:
        return [OPERATIONS[name] for name in self.names]

    @property
    def subjects(self) -> list[int]:
        """Of each client, which holder or waiter it is."""
        needs = [operation.needs for operation in self.operations]
        return [needs[:number].count(need) for number, need in enumerate(needs)]

    def __str__(self) -> str:
        return f"{' | '.join(self.names)} from {self.base}"


def base_for(names: Sequence[str], *, line: int = 0, free: int = 0, **more: Any) -> Base:
    """Return a beginning with what the operations need, ``line`` others who wait, and so many free slots."""
    needs = [OPERATIONS[name].needs for name in names]
    resized = {"shrink", "grow", "acquire two"} & set(names)
    slots = max(1, needs.count("holder") + free, 2 if resized else 1)
    return Base(slots=slots, held=slots - free, line=needs.count("line") + line, **more)
