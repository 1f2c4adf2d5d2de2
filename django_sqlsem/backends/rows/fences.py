"""Fences: the caller's own transaction keeps a permit's slots from being taken until it ends.

PostgreSQL: it locks the slot's row FOR KEY SHARE, which renewals pass; whoever takes a slot locks its row FOR UPDATE.
MySQL: a row beside the slot's, locked in share mode. The slot says that its grant was fenced, so that only who would
take such a one has to look whether it still is. SQLite: the transaction becomes the one writer.

In a cluster with several writers a row lock is known to its own node only. So the row beside is written, by the fenced
transaction and by whoever takes the slot: the cluster lets one of the two commit, and rolls the other back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.models import F

from django_sqlsem.backends.rows.statements import Row, Statements, change
from django_sqlsem.database.dialects import dialect_for, positional
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
_MARKINGS: Final = 5

# ``{ids}``: the permit's rows.
_KEY_SHARE: Final = (
    "WITH f AS MATERIALIZED (SELECT id, token, permit_id, expires_us FROM sqlsem_slot WHERE id IN ({ids})"
    " ORDER BY id FOR KEY SHARE)"
    " SELECT id, token, permit_id, {live_now}, current_setting('transaction_isolation') FROM f"
)
_SIBLING: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id IN ({ids}) ORDER BY slot_id LOCK IN SHARE MODE"
_SIBLING_WRITTEN: Final = "UPDATE sqlsem_fence SET writes = writes + 1 WHERE slot_id IN ({ids}) ORDER BY slot_id"
#: As ``_LOOK``, by a write: no node can have let somebody else take the slots before it.
_RENEWED: Final = (
    "UPDATE sqlsem_slot SET expires_us = {now} + lease_us WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
    " AND {live_now} AND fenced = token"
)
_LOOK: Final = "SELECT id, token, permit_id, {live_now}, fenced = token FROM sqlsem_slot WHERE id IN ({ids})"
_BESIDE: Final = "INSERT IGNORE INTO sqlsem_fence (slot_id, writes) VALUES (%(id)s, 0)"
_MARK: Final = "UPDATE sqlsem_slot SET fenced = token WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
# A statement that changes nothing makes its transaction the writer all the same.
_WRITER: Final = "UPDATE sqlsem_slot SET permit_id = permit_id WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
_EXTEND: Final = (
    "UPDATE sqlsem_slot SET expires_us = {now} + lease_us WHERE id IN ({ids}) AND permit_id = %(permit_id)s"
)
#: Slots that have run out, and were fenced by those that had them.
_MARKED: Final = (
    "SELECT id, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us <= {now} AND fenced = token"
)
_ALONE: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id = %(id)s FOR UPDATE SKIP LOCKED"
_EXISTS: Final = "SELECT slot_id FROM sqlsem_fence WHERE slot_id = %(id)s"
_SIBLING_TAKEN: Final = "UPDATE sqlsem_fence SET writes = writes + 1 WHERE slot_id = %(id)s"
_UNMARK: Final = "UPDATE sqlsem_slot SET fenced = NULL WHERE id = %(id)s AND token = %(token)s AND expires_us <= {now}"


def _of(held: Acquired, text: str) -> str:
    return text.replace("{ids}", ",".join(map(str, held.grant.row_ids)))


def fence(caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
    """Fence the caller's transaction. Return whether the permit is live, and stays untaken until that ends.

    ``session`` is our own. Raises ``BackendError``; ``SemaphoreError`` for a database that cannot do it.
    """
    dialect = dialect_for(caller)
    if not dialect.fence:
        raise _no_fence(caller)
    if dialect.fence == "writer":
        return _become_writer(caller, held)
    for _ in range(_MARKINGS):
        if dialect.fence == "sibling":
            session.run(lambda cursor: _mark(Statements(cursor, {"permit_id": held.permit_id}), held))
        try:
            locked = CallerSession(caller).run(lambda cursor: _lock(Statements(cursor, {}), held))
            if dialect.among_writers(caller) and _renewed(session, held):
                return True
        except BackendError:
            if not all(_look(session, held)[:2]):  # it was taken, and a strict transaction must not lock it
                return False
            raise
        if locked is not None:
            return locked
        ours, live, marked = _look(session, held)
        if not (ours and live):
            return False
        if marked or dialect.fence != "sibling":
            return True
    raise BackendError(f"{held.resource.name!r} could not be fenced: its rows change all the time.")


def _no_fence(caller: BaseDatabaseWrapper) -> SemaphoreError:
    kind = "Citus" if dialect_for(caller).sharded else caller.vendor
    return SemaphoreError(f"permit.fence() and fenced() are not there on {kind} databases: use permit.token.")


def _mark(statements: Statements, held: Acquired) -> None:
    # The insert would wait for the caller's own transaction, if that has written the row before.
    look_first = statements.dialect.among_writers(statements.cursor.db)
    for row_id in held.grant.row_ids:
        if not (look_first and statements.rows(_EXISTS, id=row_id)):
            statements.change(_BESIDE, id=row_id)
    statements.change(_of(held, _MARK))


def _lock(statements: Statements, held: Acquired) -> bool | None:
    """Lock in the caller's transaction. Return whether the permit is live; ``None``: to be asked outside of it."""
    wanted = len(held.grant.row_ids)
    if statements.dialect.fence == "sibling":
        if statements.dialect.among_writers(statements.cursor.db):
            found = statements.change(_of(held, _SIBLING_WRITTEN))
        else:
            found = len(statements.rows(_of(held, _SIBLING)))
        if found < wanted:
            raise BackendError(f"The rows of {held.resource.name!r} were deleted.")
        return None
    rows = statements.rows(_of(held, _KEY_SHARE))
    if len(rows) < wanted:
        raise BackendError(
            f"The caller's transaction does not see the rows of {held.resource.name!r}: they are newer than its"
            " snapshot. Take the permit before the transaction's first statement."
        )
    if not rows[0][4].startswith("read"):
        return None  # these columns are as old as its snapshot; the locks are those of now
    return all(_is_ours(held, row) and row[3] for row in rows)


def _renewed(session: Session, held: Acquired) -> bool:
    """Renew a live permit that is marked as fenced. Return whether it was."""
    return change(session, _of(held, _RENEWED), {"permit_id": held.permit_id}) == len(held.grant.row_ids)


def _is_ours(held: Acquired, row: Row) -> bool:
    tokens = dict(zip(held.grant.row_ids, held.grant.tokens, strict=True))
    return bool(row[2] == held.permit_id and row[1] == tokens.get(row[0]))


def _look(session: Session, held: Acquired) -> tuple[bool, bool, bool]:
    """Return whether the rows are the permit's, live, and marked as fenced."""
    rows = session.run(lambda cursor: Statements(cursor, {}).rows(_of(held, _LOOK)))
    ours = len(rows) == len(held.grant.row_ids) and all(_is_ours(held, row) for row in rows)
    return ours, all(row[3] for row in rows), all(row[4] for row in rows)


def _become_writer(caller: BaseDatabaseWrapper, held: Acquired) -> bool:
    session = CallerSession(caller)
    try:
        change(session, _of(held, _WRITER), {"permit_id": held.permit_id})
    except BackendError as error:
        raise BackendError(
            f"{error} (a transaction that has read before it writes cannot become SQLite's writer after another one"
            " has written: call fence() first, or set the database's option transaction_mode to IMMEDIATE)"
        ) from error.__cause__
    return all(_look(session, held)[:2]) and extend(caller, held)


def extend(caller: BaseDatabaseWrapper, held: Acquired) -> bool:
    """Renew the permit inside the caller's transaction, which keeps all other writers out. Return whether it was."""
    extended = change(CallerSession(caller), _of(held, _EXTEND), {"permit_id": held.permit_id})
    return extended == len(held.grant.row_ids)


def reap(session: Session, key: str) -> bool:
    """Make slots takeable that were fenced, have run out, and are fenced no more. Return whether there were any."""

    def work(cursor: AnyCursor) -> bool | None:
        statements = Statements(cursor, {"key": key})
        reaped = [_unmark(statements, *row) for row in statements.rows(_MARKED)]
        return any(reaped) or None

    return session.transaction(work) is not None


def _unmark(statements: Statements, row_id: int, token: int) -> bool:
    if not statements.rows(_ALONE, id=row_id) and statements.rows(_EXISTS, id=row_id):
        return False  # a transaction that is fenced with it is open
    if not statements.change(_UNMARK, id=row_id, token=token):
        return False
    statements.change(_SIBLING_TAKEN, id=row_id)  # one that is open on another node cannot commit any more
    return True


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
    if alone:
        FenceRow.objects.using(alias).filter(pk__in=alone).update(writes=F("writes") + 1)  # as in ``_unmark``
    return [pk for pk, _token, _fenced in found if pk not in there - alone]


def fenced_sql(caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
    """Return a condition, for a statement on ``caller``, that the permit is live, and its parameters.

    On PostgreSQL it also fences the transaction in which the statement runs.
    """
    dialect = dialect_for(caller)
    if dialect.sharded:
        raise _no_fence(caller)
    lock = " FOR KEY SHARE" if dialect.fence == "key share" else ""
    live, names = positional(dialect.expand("{live_now}"))
    values = [dialect.parameters()[name] for name in names]
    condition = f"EXISTS (SELECT 1 FROM sqlsem_slot WHERE id = %s AND token = %s AND permit_id = %s AND {live}{lock})"
    rows = list(zip(held.grant.row_ids, held.grant.tokens, strict=True))
    parameters = [each for row_id, token in rows for each in (row_id, token, held.permit_id, *values)]
    return f"({' AND '.join([condition] * len(rows))})", parameters
