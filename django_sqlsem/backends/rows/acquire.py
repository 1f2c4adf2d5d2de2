"""Claims of the rows backend: free slots are taken by one conditional UPDATE, and what is missing is created."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from django.db import IntegrityError

from django_sqlsem.backends.base import Grant, Request
from django_sqlsem.backends.rows import exclusive, queue, statements
from django_sqlsem.backends.rows.beacons import take_from_the_dead
from django_sqlsem.backends.rows.fences import reap
from django_sqlsem.backends.rows.operator import RowsOperator
from django_sqlsem.core.modes import RWLOCK, WRITER
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.exceptions import never_met, wrong_kind

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


#: How often a process says that its number of slots differs from the declared one, in seconds.
DECLARE_EVERY: Final = 60.0


class RowsClaims(RowsOperator):
    """Takes free slots, without waiting."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._declared: dict[str, float] = {}

    def claim(self, session: Session, request: Request) -> Grant | None:
        """Take slots by one statement, or create what is missing and try again."""
        dialect = dialect_for(session.connection)
        parameters = claim_parameters(request)
        quick = request.take == 1 and not request.mode
        grant = self._take_one(session, dialect, request, parameters) if quick else None
        grant = grant or self._look_and_claim(session, dialect, request, parameters)
        if grant and request.rank:
            session.run(lambda cursor: dialect.execute(cursor, queue.BACK, parameters))
        return grant

    def _take_one(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any]
    ) -> Grant | None:
        text = statements.claim(dialect, _queue(request), False, request.durable)
        # Once sent, a claim may have been granted although the answer got lost: it is not repeated as it is.
        row = session.run(lambda cursor: take(cursor, dialect, text, parameters), again=False)
        if row is None:
            return None
        self._declare(session, dialect, request, parameters, row[3])
        return Grant((row[1],), (row[2],), (row[0],))

    def _take_locked(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any]
    ) -> Grant | None:
        """Take several slots, or one of a semaphore that shrinks, under the lock of the semaphore's row."""

        def work(cursor: AnyCursor) -> list[Grant] | None:
            dialect.execute(cursor, statements.lock(dialect), parameters)
            found = cursor.fetchone()
            if found is None:
                return None
            operator_slots, declared_slots, _paused, shrinking, _now = found
            above = whole = False
            if shrinking:
                above, whole = exclusive.settle(dialect, cursor, parameters, operator_slots)
            if whole:
                return None
            bound = statements.bound(operator_slots, request.slots, declared_slots)
            live = 0
            if above or request.take > 1:
                dialect.execute(cursor, statements.count(dialect), parameters | {"bound": bound})
                live = cursor.fetchone()[0]
            rows: list[tuple[Any, ...]] = []
            if live + request.take <= bound:
                text = statements.claim(dialect, _queue(request), True, request.durable)
                for _nth in range(request.take):
                    row = take(cursor, dialect, text, parameters, {row[0] for row in rows})
                    if row is not None:
                        rows.append(row)
            if len(rows) == request.take:
                ids, slots, tokens, _ = zip(*(row[:4] for row in sorted(rows, key=lambda row: row[1])), strict=True)
                return [Grant(slots, tokens, ids)]
            return None if rows or above else []

        grants = session.transaction(work, again=False)
        return grants[0] if grants else None

    def _take_from_the_dead(self, session: Session, dialect: Dialect, request: Request, suspects: int | None) -> bool:
        reaped = bool(suspects) and dialect.fence == "sibling" and reap(session, dialect, request.resource.key)
        if not request.presence.beacon or suspects == 0:
            return reaped
        if suspects is None and session.connection.vendor != "sqlite":
            return False
        parameters = {"key": request.resource.key, "process_id": request.holder.process}
        return take_from_the_dead(session, dialect, parameters) or reaped

    def _look_and_claim(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any], *, unseen: bool = False
    ) -> Grant | None:
        """``unseen``: when it claimed, the name was not there, and by now may be, with slots that are free."""
        looked = self._look(session, dialect, request, parameters)
        if isinstance(looked, Grant):
            return looked
        created, shrinking = looked
        if request.mode:
            return exclusive.claim(session, dialect, request, parameters)
        if request.take > 1 or shrinking:
            return self._take_locked(session, dialect, request, parameters)
        return self._take_one(session, dialect, request, parameters) if created or unseen else None

    def _look(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any]
    ) -> Grant | tuple[bool, bool]:
        """Check the name and create what is missing.

        Return what was taken of a new name; else whether there may be free slots by now, and whether the semaphore
        shrinks.
        """
        found, created = None, False
        while found is None:
            found = session.run(lambda cursor: fetch(cursor, dialect, statements.look(dialect), parameters))
            if found is None:
                grant = self._create(session, dialect, request, parameters, request.slots or 1)
                if grant is not None:
                    return grant
                created = True
        kind, declared_slots, operator_slots, shrinking, rows, suspects, young = found
        if kind != request.resource.kind:
            raise wrong_kind(request.resource.name, kind, request.resource.kind)
        bound = statements.bound(operator_slots, request.slots, declared_slots)
        if request.take > bound:
            raise never_met(request.resource.name, bound, request.take)
        if rows < bound:
            self._create(session, dialect, request, parameters, bound)
            created = True
        self._declare(session, dialect, request, parameters, declared_slots)
        created = created or bool(young)
        if not created:
            created = self._take_from_the_dead(session, dialect, request, suspects)
        return created, bool(shrinking)

    def _create(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any], slots: int
    ) -> Grant | None:
        """Create what is missing. A new name is born with what is claimed taken: others never see it all free."""
        begin, end = dialect.insert_ignore or ("INSERT INTO", "")

        def insert(cursor: AnyCursor, text: str, values: dict[str, Any] | tuple[Any, ...]) -> bool:
            try:
                if isinstance(values, dict):
                    dialect.execute(cursor, f"{begin} {text}{end}", values)
                else:
                    cursor.execute(f"{begin} {text}{end}", values)
                return dialect.insert_ignore is None or cursor.rowcount > 0
            except (IntegrityError, driver_of(cursor).IntegrityError):
                if dialect.insert_ignore:
                    raise
                return False

        def create(cursor: AnyCursor) -> list[Grant]:
            new = insert(
                cursor, statements.INSERT_SEMAPHORE, parameters | {"name": request.resource.name, "slots": slots}
            )
            # Locked: while somebody has all slots, no more of them may be open.
            found = fetch(cursor, dialect, statements.lock(dialect), parameters)
            shrinking = found is not None and bool(found[3])
            there = {row[0] for row in fetch_all(cursor, dialect, statements.SLOTS, parameters)}
            for slot in range(WRITER if request.resource.kind == RWLOCK else 1, slots + 1):
                if slot not in there:
                    insert(
                        cursor, statements.INSERT_SLOT, (request.resource.key, slot, shrinking or slot == WRITER, False)
                    )
            if not new or there or request.mode or request.take > slots:
                return []
            dialect.execute(cursor, statements.take_new(dialect), parameters)
            ids, numbers, tokens, _ = zip(*fetch_all(cursor, dialect, statements.GRANTED, parameters), strict=True)
            return [Grant(numbers, tokens, ids)]

        # It may have been granted although the answer got lost: like a claim, it is not repeated as it is.
        grants = session.transaction(create, again=False)
        return grants[0] if grants else None

    def _declare(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any], declared_slots: int
    ) -> None:
        """Say if this process's number of slots differs; two processes that disagree say so once a minute."""
        if request.slots in (None, declared_slots):
            return
        key = request.resource.key
        if time.monotonic() < self._declared.get(key, 0.0):
            return
        if len(self._declared) > 10_000:
            self._declared.clear()
        self._declared[key] = time.monotonic() + DECLARE_EVERY
        session.run(lambda cursor: dialect.execute(cursor, statements.DECLARE, parameters))


def driver_of(cursor: AnyCursor) -> Any:
    connection: Any = cursor.db
    return connection.Database


def take(
    cursor: AnyCursor,
    dialect: Dialect,
    text: str,
    parameters: dict[str, Any],
    before: Collection[int] = (),
) -> tuple[Any, ...] | None:
    """Run one claim; return the row's id, slot, token and the declared number of slots, or ``None``.

    ``before``: the ids of the rows that the same permit has already.
    """
    if dialect.returning:
        return fetch(cursor, dialect, text, parameters)
    if dialect.update_limit:
        dialect.execute(cursor, text, parameters)
        taken = cursor.rowcount
    else:
        taken = 0
        for (row_id,) in fetch_all(cursor, dialect, statements.candidates(dialect), parameters):
            dialect.execute(cursor, text, parameters | {"id": row_id})
            taken = cursor.rowcount
            if taken:
                break
    if not taken:
        return None
    # It may be a lower slot than one before, given back meanwhile; and it may have been revoked at once.
    found = fetch_all(cursor, dialect, statements.GRANTED, parameters)
    return next((row for row in found if row[0] not in before), None)


def _queue(request: Request) -> str:
    if not request.fair:
        return "barge"
    return "ranked" if request.rank else "newcomer"


def claim_parameters(request: Request) -> dict[str, Any]:
    holder = request.holder
    return {
        "key": request.resource.key,
        "kind": request.resource.kind,
        "permit_id": request.permit_id,
        "slots": request.slots,
        "take": request.take,
        "lease_us": round(request.lease * 1e6),
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
        "label": holder.label,
        "user": holder.user,
        "process_id": holder.process,
        "channel": request.presence.channel,
        "near": request.presence.near,
        "bells": request.presence.bells,
        "beacon": request.presence.beacon,
        "witness": request.presence.beacon,
        "durable": request.durable,
        "rank": request.rank,
        "mode": request.mode,
        "by_steps": request.resource.kind == RWLOCK,
    }


def fetch(cursor: AnyCursor, dialect: Dialect, text: str, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
    dialect.execute(cursor, text, parameters)
    row: tuple[Any, ...] | None = cursor.fetchone()
    return row


def fetch_all(cursor: AnyCursor, dialect: Dialect, text: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    dialect.execute(cursor, text, parameters)
    return list(cursor.fetchall())
