"""Tokens between their grant and the caller: taken for good on the keeper's side, where nothing strikes half-way."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from django_sqlsem.backends.counting import Counting
from django_sqlsem.caller_sessions import CallerSession
from django_sqlsem.clocks import boot_now
from django_sqlsem.exceptions import BackendError
from django_sqlsem.sessions import OwnSession

if TYPE_CHECKING:
    from django_sqlsem.holds import Hold
    from django_sqlsem.keeper import Keeper
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session

logger = logging.getLogger("django_sqlsem")

#: A login that takes longer is not waited for before the claim, in seconds.
LONGEST_LOGIN: Final = 20.0


def get_ready(keeper: Keeper) -> None:
    """Open the connections that a grant and its taking need: a slow login would outlast what is handed over.

    Raises ``BackendError``.
    """
    if not isinstance(keeper.session_here(), CallerSession):
        _open(keeper.work)
    if isinstance(keeper.own, OwnSession) and not keeper.own.is_open:
        opened = threading.Event()
        keeper.post(lambda: _try_to_open(keeper.own))
        keeper.post(opened.set)
        opened.wait(LONGEST_LOGIN)


async def aget_ready(keeper: Keeper) -> None:
    """Do what ``get_ready()`` does, from a coroutine, whose statements are the keeper's."""
    await keeper.call(lambda: _open(keeper.own))


def _open(session: Session) -> None:
    if isinstance(session, OwnSession) and not session.is_open:
        session.run(lambda cursor: None)


def _try_to_open(session: Session) -> None:
    with contextlib.suppress(BackendError):  # then the claim meets it too
        _open(session)


def take(keeper: Keeper, hold: Hold) -> bool:
    """Take a grant for good, blocking this thread. Return whether it still was there. Raises ``BackendError``."""
    session = keeper.session_here()
    if isinstance(session, CallerSession):  # whose transaction keeps all others from writing
        taken = _take(keeper, hold, session)
        if taken:
            hold.releasing.acquire(blocking=False)  # if that is undone, then by the end of the transaction
        return taken
    done: concurrent.futures.Future[bool] = concurrent.futures.Future()

    def step() -> None:
        try:
            taken = _take(keeper, hold, keeper.own)
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            done.set_exception(error)
        else:
            done.set_result(taken)

    keeper.post(step)
    return done.result()


async def atake(keeper: Keeper, hold: Hold) -> bool:
    """Take a grant for good. Return whether it still was there. Raises ``BackendError``."""
    return await keeper.call(lambda: _take(keeper, hold, keeper.own))


def _take(keeper: Keeper, hold: Hold, session: Session) -> bool:
    if hold.abandoned:  # its caller has gone meanwhile: what it was granted goes back
        return False
    taken = cast("Counting", keeper.backend).take(session, hold.permit_id)
    if taken:
        hold.released = True  # nothing is held from here on
        keeper.holds.pop(id(hold), None)
        if keeper.history is not None and hold.grant is not None:
            keeper.history.granted(hold.claim, hold.grant, hold.granted_at, hold.waited)
    return taken


def give_up(keeper: Keeper, hold: Hold, put_back: Callable[[Keeper, int], None]) -> None:
    """The caller was struck: what it was granted goes back, also if it was taken already."""
    keeper.abandon(hold)  # at once: nothing more is handed over, or taken

    def undo() -> None:
        if not (hold.released and hold.releasing.acquire(blocking=False)):
            return  # it was not taken, or has gone back already
        try:
            put_back(keeper, hold.claim.take)
        except BackendError:
            name, count = hold.claim.resource.name, hold.claim.take
            message = "%d of the tokens %r were taken by who had gone, and could not be put back."
            logger.exception(message, count, name, extra={"semaphore": name, "what": "tokens_lost", "count": count})

    keeper.post(undo)


def add(keeper: Keeper, session: Session, resource: Resource, count: int, *, initial: int, hand_on: bool) -> None:
    """Add tokens, and give them to whoever waits for them in this process. Raises ``BackendError``."""
    backend = cast("Counting", keeper.backend)
    sent = boot_now()
    presence = keeper.presence
    for granted in backend.add(session, resource, count, initial=initial, presence=presence, hand_on=hand_on):
        keeper.deliver(granted, sent, resource)
    if keeper.backend.process_local and (arbiter := keeper.arbiters.get(resource.key)) is not None:
        keeper.poke(arbiter)
