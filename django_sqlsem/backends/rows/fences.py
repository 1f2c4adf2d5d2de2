"""Fences of the rows backend: the caller's own transaction keeps a permit's slots from being taken until it ends.

PostgreSQL: it locks the slot's row FOR KEY SHARE, which renewals pass; whoever takes a slot locks its row FOR UPDATE.
MySQL: a row beside the slot's, locked in share mode. The slot says that its grant was fenced, so that only who would
take such a one has to look whether it still is. SQLite: the transaction becomes the one writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.database.sessions import CallerSession
from django_sqlsem.exceptions import BackendError, SemaphoreError
from django_sqlsem.models import FenceRow

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import QuerySet

    from django_sqlsem.backends.base import Acquired
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.models import SlotRow


#: How often a fence is tried anew that another process has taken the mark of meanwhile.
TRIES: Final = 5

_COLUMNS: Final = "id, token, permit_id, {live}"
_KEY_SHARE: Final = (
    "WITH f AS MATERIALIZED (SELECT id, token, permit_id, expires_us FROM sqlsem_slot WHERE id IN ({ids})"
    f" ORDER BY id FOR KEY SHARE) SELECT {_COLUMNS}, current_setting('transaction_isolation') FROM f"
)
_SIBLING: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id IN ({ids}) ORDER BY slot_id LOCK IN SHARE MODE"
_LOOK: Final = f"SELECT {_COLUMNS}, fenced = token FROM sqlsem_slot WHERE id IN ({{ids}})"
_MARK: Final = "UPDATE sqlsem_slot SET fenced = token WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
# A statement that changes nothing makes its transaction the writer all the same.
_WRITER: Final = "UPDATE sqlsem_slot SET permit_id = permit_id WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
_EXTEND: Final = (
    "UPDATE sqlsem_slot SET expires_us = {now} + lease_us WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
)
_MARKED: Final = (
    "SELECT id, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us <= {now} AND fenced = token"
)
_ALONE: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id = %(id)s FOR UPDATE SKIP LOCKED"
_EXISTS: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id = %(id)s"
_UNMARK: Final = "UPDATE sqlsem_slot SET fenced = NULL WHERE id = %(id)s AND token = %(token)s AND expires_us <= {now}"


def _text(dialect: Dialect, held: Acquired, text: str) -> str:
    live = dialect.live_sql().replace("{now}", dialect.moment_sql)
    return text.replace("{ids}", ",".join(map(str, held.grant.row_ids))).replace("{live}", live)


def fence(caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
    """Fence the caller's transaction. Return whether the permit is live, and stays untaken until that ends.

    ``session`` is our own. Raises ``BackendError``; ``SemaphoreError`` for a database that cannot do it.
    """
    dialect = dialect_for(caller)
    if not dialect.fence:
        raise SemaphoreError(f"permit.fence() is not there on {caller.vendor} databases: use permit.token.")
    if dialect.fence == "writer":
        return _become_writer(dialect, caller, held)
    for _ in range(TRIES):
        if dialect.fence == "sibling":
            session.run(lambda cursor: _mark(dialect, cursor, held))
        try:
            locked = CallerSession(caller).run(lambda cursor: _lock(dialect, cursor, held))
        except BackendError:
            if not all(_look(dialect, session, held)[:2]):  # it was taken, and a strict transaction must not lock it
                return False
            raise
        if locked is not None:
            return locked
        ours, live, marked = _look(dialect, session, held)
        if not (ours and live):
            return False
        if marked or dialect.fence != "sibling":
            return True
    raise BackendError(f"{held.resource.name!r} could not be fenced: its rows change all the time.")


def _mark(dialect: Dialect, cursor: AnyCursor, held: Acquired) -> None:
    for row_id in held.grant.row_ids:
        cursor.execute(f"INSERT IGNORE INTO sqlsem_fence (slot_id) VALUES ({row_id})")
    dialect.execute(cursor, _text(dialect, held, _MARK), {"permit_id": held.permit_id})


def _lock(dialect: Dialect, cursor: AnyCursor, held: Acquired) -> bool | None:
    """Lock in the caller's transaction. Return whether the permit is live; ``None``: to be asked outside of it."""
    wanted = len(held.grant.row_ids)
    if dialect.fence == "sibling":
        dialect.execute(cursor, _text(dialect, held, _SIBLING), {})
        if len(cursor.fetchall()) < wanted:
            raise BackendError(f"The rows of {held.resource.name!r} were deleted.")
        return None
    dialect.execute(cursor, _text(dialect, held, _KEY_SHARE), {})
    rows = cursor.fetchall()
    if len(rows) < wanted:
        raise BackendError(
            f"The caller's transaction does not see the rows of {held.resource.name!r}: they are newer than its"
            " snapshot. Take the permit before the transaction's first statement."
        )
    if not rows[0][4].startswith("read"):
        return None  # these columns are as old as its snapshot; the locks are those of now
    return all(_is_ours(held, row) and row[3] for row in rows)


def _is_ours(held: Acquired, row: tuple[Any, ...]) -> bool:
    tokens = dict(zip(held.grant.row_ids, held.grant.tokens, strict=True))
    return bool(row[2] == held.permit_id and row[1] == tokens.get(row[0]))


def _look(dialect: Dialect, session: Session, held: Acquired) -> tuple[bool, bool, bool]:
    """Return whether the rows are the permit's, live, and marked as fenced."""

    def look(cursor: AnyCursor) -> list[tuple[Any, ...]]:
        dialect.execute(cursor, _text(dialect, held, _LOOK), {})
        return list(cursor.fetchall())

    rows = session.run(look)
    ours = len(rows) == len(held.grant.row_ids) and all(_is_ours(held, row) for row in rows)
    return ours, all(row[3] for row in rows), all(row[4] for row in rows)


def _become_writer(dialect: Dialect, caller: BaseDatabaseWrapper, held: Acquired) -> bool:
    session = CallerSession(caller)
    parameters = {"permit_id": held.permit_id}
    try:
        session.run(lambda cursor: dialect.execute(cursor, _text(dialect, held, _WRITER), parameters))
    except BackendError as error:
        raise BackendError(
            f"{error} (a transaction that has read before it writes cannot become SQLite's writer after another one"
            " has written: call fence() first, or set the database's option transaction_mode to IMMEDIATE)"
        ) from error.__cause__
    return all(_look(dialect, session, held)[:2]) and extend(caller, held)


def extend(caller: BaseDatabaseWrapper, held: Acquired) -> bool:
    """Renew the permit inside the caller's transaction, which keeps all other writers out. Return whether it was."""
    dialect = dialect_for(caller)

    def run(cursor: AnyCursor) -> bool:
        dialect.execute(cursor, _text(dialect, held, _EXTEND), {"permit_id": held.permit_id})
        return cursor.rowcount == len(held.grant.row_ids)

    return CallerSession(caller).run(run)


def reap(session: Session, dialect: Dialect, key: str) -> bool:
    """Make slots takeable that were fenced, have run out, and are fenced no more. Return whether there were any."""

    def work(cursor: AnyCursor) -> list[int] | None:
        dialect.execute(cursor, _MARKED, {"key": key})
        reaped = [row[0] for row in list(cursor.fetchall()) if _unmark(dialect, cursor, *row)]
        return reaped or None

    return session.transaction(work) is not None


def _unmark(dialect: Dialect, cursor: AnyCursor, row_id: int, token: int) -> bool:
    parameters = {"id": row_id, "token": token}
    dialect.execute(cursor, _ALONE, parameters)
    if not cursor.fetchall():
        dialect.execute(cursor, _EXISTS, parameters)
        if cursor.fetchall():
            return False  # a transaction that is fenced with it is open
    dialect.execute(cursor, _UNMARK, parameters)
    return cursor.rowcount > 0


def unfenced(rows: QuerySet[SlotRow], alias: str) -> list[int]:
    """Lock slots in the open transaction of an operator, and return the ids of those that no other one keeps."""
    skip = connections[alias].features.has_select_for_update_skip_locked
    found = list(rows.select_for_update(skip_locked=skip).values_list("pk", "token", "fenced"))
    if dialect_for(connections[alias]).fence != "sibling":
        return [pk for pk, _token, _fenced in found]
    marked = [pk for pk, token, fenced in found if fenced == token]
    beside = FenceRow.objects.using(alias).filter(pk__in=marked).order_by("pk")
    there = set(beside.values_list("pk", flat=True))
    alone = set(beside.select_for_update(skip_locked=skip).values_list("pk", flat=True)) if there else set()
    return [pk for pk, _token, _fenced in found if pk not in there - alone]


def fenced_sql(connection: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
    """Return a condition, for a statement on ``connection``, that the permit is live, and its parameters.

    On PostgreSQL it also fences the transaction in which the statement runs.
    """
    dialect = dialect_for(connection)
    live = dialect.live_sql().replace("{now}", dialect.moment_sql).replace("{now}", dialect.now_sql)
    values = dialect.parameters()
    lock = " FOR KEY SHARE" if dialect.fence == "key share" else ""
    conditions, parameters = [], []
    for row_id, token in zip(held.grant.row_ids, held.grant.tokens, strict=True):
        each, more = live, []
        for name in ("now", "boot_id"):
            if f"%({name})s" in each:
                each = each.replace(f"%({name})s", "%s")
                more.append(values[name])
        conditions.append(
            f"EXISTS (SELECT 1 FROM sqlsem_slot WHERE id = %s AND token = %s AND permit_id = %s AND {each}{lock})"
        )
        parameters += [row_id, token, held.permit_id, *more]
    return f"({' AND '.join(conditions)})", parameters
