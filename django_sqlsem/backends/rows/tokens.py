"""Tokens on rows: what the rows backend does with claims of the kind ``tokens``. The count itself is the ledger's."""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Grant, Granted, Queue, Waited
from django_sqlsem.backends.rows.acquire import claim_parameters
from django_sqlsem.backends.rows.ledger import ROW, Ledger, granted_as, put_back, stand, transact
from django_sqlsem.backends.rows.queue import AHEAD, PATIENCE_US
from django_sqlsem.core.clocks import boot_now_us
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.exceptions import BackendError

if TYPE_CHECKING:
    from django_sqlsem.backends.base import Place, Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session


_TAKE: Final = "DELETE FROM sqlsem_waiter WHERE ticket = %(permit_id)s AND away = %(yes)s"


@functools.cache
def _keep(dialect: Dialect) -> tuple[str, ...]:
    """Say that the waiter lives, and look around: one statement, or two."""
    ahead = AHEAD.replace("{waits}", dialect.waits_sql("w."))
    seen = (
        f"{ahead}, (SELECT CASE WHEN m.paused = %(no)s THEN m.tokens ELSE 0 END FROM sqlsem_semaphore m"
        " WHERE m.name_key = %(key)s),"
        f" (SELECT MIN(CASE WHEN {dialect.live_sql('g.')} THEN g.expires_us - {{now}} ELSE 0 END)"
        " FROM sqlsem_waiter g WHERE g.semaphore_key = %(key)s AND g.away = %(yes)s)"
    )
    text = (
        "UPDATE sqlsem_waiter SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s,"
        " channel = %(channel)s, beacon = %(beacon)s"
    )
    where = "WHERE ticket = %(permit_id)s AND away = %(no)s"
    if dialect.writing_ctes:
        return (f"{text} {where} RETURNING {seen}{dialect.unflushed}",)
    return f"{text} {where}", f"SELECT {seen} FROM sqlsem_waiter {where}"


def claim(session: Session, request: Request) -> Grant | None:
    """Have tokens handed out if they are there and nobody comes first."""
    parameters = claim_parameters(request) | {"arrived_us": boot_now_us(), "waiting": 1}
    mine, _ = _stand(session, request, parameters, stay=False)
    return mine[0].grant if mine else None


def enrol(session: Session, request: Request, place: Place) -> Waited:
    """The same, or else take a place in the queue."""
    parameters = claim_parameters(request) | {"arrived_us": round(place.arrived * 1e6), "waiting": place.waiting}
    granted, ahead = _stand(session, request, parameters, stay=True)
    served = any(each.permit_id == request.permit_id for each in granted)
    return Waited(granted, None if served else Queue(ahead=ahead))


def _stand(
    session: Session, request: Request, parameters: dict[str, Any], *, stay: bool
) -> tuple[tuple[Granted, ...], int]:
    result, others = transact(
        session,
        dialect_for(session.connection),
        request.resource,
        parameters,
        partial(stand, stay=stay),
        initial=request.slots or 0,
        # A claim that does not stay can tell nobody else in its process.
        here=request.holder.process if stay else "",
    )
    mine, ahead = result or (None, 0)
    return ((mine, *others) if mine else others), ahead


def wait(session: Session, request: Request, place: Place) -> Waited:
    """Keep the place; the first in line sees that what is there, or comes back, is handed out."""
    dialect = dialect_for(session.connection)
    parameters = claim_parameters(request) | {"waiting": place.waiting}
    queue = session.run(lambda cursor: _look(dialect, cursor, parameters))
    if queue is None:
        mine = granted(session, request)
        return Waited((mine,) if mine else ())
    if queue.ahead == 0 and (queue.free >= request.take or queue.expiry_in == 0):
        return Waited(hand_out(session, request.resource, here=request.holder.process), queue)
    return Waited((), queue)


def _look(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any]) -> Queue | None:
    values = parameters | {"yes": True, "patience_us": PATIENCE_US}
    for text in _keep(dialect):
        dialect.execute(cursor, text, values)
    row = cursor.fetchone()
    if row is None:
        return None
    ahead, tokens, lapse_us = row[:3]
    return Queue(
        ahead=int(ahead),
        free=int(tokens or 0),
        expiry_in=None if lapse_us is None else max(0.0, int(lapse_us) / 1e6),
    )


def granted(session: Session, request: Request) -> Granted | None:
    """Return what was handed to a waiter."""
    row = _row(session, request.permit_id)
    return granted_as(request.permit_id, row[0], row[1], row[3]) if row and row[2] else None


def _row(session: Session, permit_id: str) -> tuple[Any, ...] | None:
    dialect = dialect_for(session.connection)

    def read(cursor: AnyCursor) -> tuple[Any, ...] | None:
        dialect.execute(cursor, ROW, {"permit_id": permit_id})
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row

    return session.run(read)


def take(session: Session, permit_id: str) -> bool:
    """Take for good what was handed to a claim. Return whether it was still there."""
    dialect = dialect_for(session.connection)

    def run(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, _TAKE, {"permit_id": permit_id, "yes": True})
        return cursor.rowcount > 0

    try:
        return session.run(run, again=False)
    except BackendError as error:
        # Most likely it never arrived; if the row is gone, nobody can say whether that was it.
        if error.stale_connection and session.run(run, again=False):
            return True
        raise


def discard(session: Session, resource: Resource, permit_id: str) -> bool:
    """Give up a claim: its place in the queue, or the tokens that it was handed. Return whether it had any."""
    if _row(session, permit_id) is None:
        return False
    dialect = dialect_for(session.connection)
    result, _ = transact(session, dialect, resource, {"permit_id": permit_id}, put_back)
    return bool(result)


def hand_out(session: Session, resource: Resource, *, here: str = "") -> tuple[Granted, ...]:
    """Hand what is there to the oldest waiters."""
    return transact(session, dialect_for(session.connection), resource, {}, Ledger.serve, here=here)[1]


def add(
    session: Session, resource: Resource, count: int, *, initial: int, witness: bool, here: str, hand_on: bool
) -> tuple[Granted, ...]:
    """Add tokens, and hand them on. Returns who in the process ``here`` got some."""

    def work(ledger: Ledger) -> None:
        ledger.add(count)
        if hand_on:
            ledger.serve()

    dialect = dialect_for(session.connection)
    return transact(session, dialect, resource, {"witness": witness}, work, initial=initial, here=here)[1]
