"""Semaphores on rows: one row per slot, claimed by one conditional UPDATE. For every database but SQL Server."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.db import IntegrityError

from django_sqlsem.backends import rows_sql as sql
from django_sqlsem.backends.base import Claim, Grant, Held, Place, Renewal, Waited
from django_sqlsem.backends.dialects import Dialect, dialect_for
from django_sqlsem.backends.rows_operator import RowsOperator
from django_sqlsem.backends.rows_renewal import renew
from django_sqlsem.backends.rows_snapshot import read_snapshot
from django_sqlsem.exceptions import never_met, wrong_kind

if TYPE_CHECKING:
    from django.db.backends.utils import CursorWrapper

    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session
    from django_sqlsem.snapshots import SemaphoreSnapshot

#: A waiter that has not been heard of for so long is dead, in microseconds: three heartbeats.
PATIENCE_US: Final = 2_100_000
#: How often a process says that its number of slots differs from the declared one, in seconds.
DECLARE_EVERY: Final = 60.0


class RowsBackend(RowsOperator):
    """The portable backend. The database's row locks keep the invariant; no counter can leak or over-admit."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self._declared: dict[str, float] = {}

    def claim(self, session: Session, claim: Claim) -> Grant | None:
        """Take slots by one statement, or create what is missing and try again."""
        dialect = dialect_for(session.connection)
        queue = "newcomer" if claim.fair else "barge"
        parameters = _parameters(claim)
        if claim.take == 1:
            grant = self._take_one(session, dialect, claim, queue, parameters)
            if grant:
                return grant
        return self._look_and_claim(session, dialect, claim, queue, parameters)[0]

    def wait(self, session: Session, claim: Claim, place: Place) -> Waited:
        """Write the place if it is due, then claim if nobody older waits; at a heartbeat, look around as well."""
        dialect = dialect_for(session.connection)
        parameters = _parameters(claim) | {
            "ticket": place.ticket,
            "age_us": round(place.age * 1e6),
            "patience_us": PATIENCE_US,
            "waiting": place.waiting,
        }
        queue = "waiter" if claim.fair else "barge"
        if place.refresh or place.moved:
            self._keep_place(session, dialect, place, parameters)
        if place.refresh:
            grant, ahead, expiry_in = self._look_and_claim(session, dialect, claim, queue, parameters)
            return Waited(grant, ahead, expiry_in)
        ahead, free = session.run(lambda cursor: _fetch(cursor, dialect, sql.ahead(dialect), parameters)) or (0, 0)
        if not free or (ahead and claim.fair):
            return Waited(None, int(ahead))
        take = self._take_one if claim.take == 1 else self._take_locked
        return Waited(take(session, dialect, claim, queue, parameters), int(ahead))

    def leave(self, session: Session, ticket: str) -> None:
        """Delete the waiter's row."""
        dialect = dialect_for(session.connection)
        session.run(lambda cursor: dialect.execute(cursor, sql.LEAVE, {"ticket": ticket}))

    def release(self, session: Session, held: Held) -> bool:
        """Free the rows that still carry the permit's id."""
        ids = ",".join(map(str, held.grant.row_ids))
        return self._free(session, sql.RELEASE % ids, {"permit_id": held.permit_id})

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free whatever rows carry the permit's id."""
        return self._free(session, sql.DISCARD, {"key": resource.key, "permit_id": permit_id})

    def _free(self, session: Session, statement: str, parameters: dict[str, Any]) -> bool:
        dialect = dialect_for(session.connection)

        def free(cursor: CursorWrapper) -> bool:
            dialect.execute(cursor, statement, parameters)
            return bool(cursor.rowcount > 0)

        return session.run(free)

    def renew(self, session: Session, held: Sequence[Held]) -> Renewal:
        """Extend all these grants, some hundred to a statement."""
        return renew(session, dialect_for(session.connection), held)

    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Read one name in three statements on our own connection, whatever the caller's transaction is up to."""
        return read_snapshot(session, dialect_for(session.connection), resource)

    def _take_one(
        self, session: Session, dialect: Dialect, claim: Claim, queue: str, parameters: dict[str, Any]
    ) -> Grant | None:
        text = sql.claim(dialect, queue, False)
        # Once sent, a claim may have been granted although the answer got lost: it is not repeated as it is.
        row = session.run(lambda cursor: take(cursor, dialect, text, parameters), again=False)
        if row is None:
            return None
        if claim.slots is not None and row[3] != claim.slots:
            self._declare(session, dialect, claim, parameters)
        return Grant((row[1],), (row[2],), (row[0],))

    def _take_locked(
        self, session: Session, dialect: Dialect, claim: Claim, queue: str, parameters: dict[str, Any]
    ) -> Grant | None:
        """Take several slots, or one of a semaphore that shrinks, under the lock of the semaphore's row."""

        def work(cursor: CursorWrapper) -> list[Grant] | None:
            dialect.execute(cursor, sql.lock(dialect), parameters)
            found = cursor.fetchone()
            if found is None:
                return None
            operator_slots, declared_slots, shrinking = found
            bound = next(number for number in (operator_slots, claim.slots, declared_slots) if number is not None)
            dialect.execute(cursor, sql.count(dialect), parameters | {"bound": bound})
            live, above = cursor.fetchone()
            if shrinking and not above:
                dialect.execute(cursor, sql.SHRUNK, parameters)
            rows: list[tuple[Any, ...]] = []
            if live + claim.take <= bound:
                text = sql.claim(dialect, queue, True)
                for _nth in range(claim.take):
                    row = take(cursor, dialect, text, parameters, {row[0] for row in rows})
                    if row is not None:
                        rows.append(row)
            if len(rows) == claim.take:
                ids, slots, tokens, _ = zip(*sorted(rows, key=lambda row: row[1]), strict=True)
                return [Grant(slots, tokens, ids)]
            return None if rows or above else []

        grants = session.transaction(work, again=False)
        return grants[0] if grants else None

    def _look_and_claim(
        self, session: Session, dialect: Dialect, claim: Claim, queue: str, parameters: dict[str, Any]
    ) -> tuple[Grant | None, int, float | None]:
        parameters = {"ticket": ""} | parameters
        found, created = None, False
        while found is None:
            found = session.run(lambda cursor: _fetch(cursor, dialect, sql.look(dialect), parameters))
            if found is None:
                self._create(session, dialect, claim, parameters, claim.slots or 1)
                created = True
        kind, declared_slots, operator_slots, shrinking, rows, expiry_us, ahead = found
        if kind != claim.resource.kind:
            raise wrong_kind(claim.resource.name, kind, claim.resource.kind)
        bound = next(number for number in (operator_slots, claim.slots, declared_slots) if number is not None)
        if claim.take > bound:
            raise never_met(claim.resource.name, bound, claim.take)
        if rows < bound:
            self._create(session, dialect, claim, parameters, bound)
            created = True
        if claim.slots is not None and claim.slots != declared_slots:
            self._declare(session, dialect, claim, parameters)
        grant = None
        if claim.take > 1 or shrinking:
            grant = self._take_locked(session, dialect, claim, queue, parameters)
        elif created or "age_us" in parameters:
            grant = self._take_one(session, dialect, claim, queue, parameters)
        return grant, int(ahead), None if expiry_us is None else max(0.0, int(expiry_us) / 1e6)

    def _keep_place(self, session: Session, dialect: Dialect, place: Place, parameters: dict[str, Any]) -> None:
        def keep(cursor: CursorWrapper) -> None:
            dialect.execute(cursor, sql.MOVE if place.moved else sql.KEEP, parameters)
            if cursor.rowcount:
                return
            boot = " OR boot_id <> %(boot_id)s" if dialect.boot_id else ""
            dialect.execute(cursor, sql.SWEEP.replace("{boot}", boot), parameters)
            dialect.execute(cursor, sql.ENQUEUE, parameters)

        session.run(keep)

    def _create(self, session: Session, dialect: Dialect, claim: Claim, parameters: dict[str, Any], slots: int) -> None:
        begin, end = dialect.insert_ignore or ("INSERT INTO", "")

        def insert(cursor: CursorWrapper, text: str, values: dict[str, Any] | tuple[Any, ...]) -> None:
            try:
                if isinstance(values, dict):
                    dialect.execute(cursor, f"{begin} {text}{end}", values)
                else:
                    cursor.execute(f"{begin} {text}{end}", values)
            except IntegrityError:
                if dialect.insert_ignore:
                    raise

        def create(cursor: CursorWrapper) -> bool:
            insert(cursor, sql.INSERT_SEMAPHORE, parameters | {"name": claim.resource.name, "slots": slots})
            there = {row[0] for row in _fetch_all(cursor, dialect, sql.SLOTS, parameters)}
            for slot in range(1, slots + 1):
                if slot not in there:
                    insert(cursor, sql.INSERT_SLOT, (claim.resource.key, slot, False))
            return True

        session.transaction(create)

    def _declare(self, session: Session, dialect: Dialect, claim: Claim, parameters: dict[str, Any]) -> None:
        """Say that this process's number of slots differs; two processes that disagree say so once a minute."""
        key = claim.resource.key
        if time.monotonic() < self._declared.get(key, 0.0):
            return
        if len(self._declared) > 10_000:
            self._declared.clear()
        self._declared[key] = time.monotonic() + DECLARE_EVERY
        session.run(lambda cursor: dialect.execute(cursor, sql.DECLARE, parameters))


def take(
    cursor: CursorWrapper,
    dialect: Dialect,
    text: str,
    parameters: dict[str, Any],
    before: Collection[int] = (),
) -> tuple[Any, ...] | None:
    """Run one claim; return the row's id, slot, token and the declared number of slots, or ``None``.

    ``before``: the ids of the rows that the same permit has already.
    """
    if dialect.returning:
        return _fetch(cursor, dialect, text, parameters)
    if dialect.update_limit:
        dialect.execute(cursor, text, parameters)
        taken = cursor.rowcount
    else:
        taken = 0
        for (row_id,) in _fetch_all(cursor, dialect, sql.candidates(dialect), parameters):
            dialect.execute(cursor, text, parameters | {"id": row_id})
            taken = cursor.rowcount
            if taken:
                break
    if not taken:
        return None
    # It may be a lower slot than one before, given back meanwhile; and it may have been revoked at once.
    found = _fetch_all(cursor, dialect, sql.GRANTED, parameters)
    return next((row for row in found if row[0] not in before), None)


def _parameters(claim: Claim) -> dict[str, Any]:
    holder = claim.holder
    return {
        "key": claim.resource.key,
        "kind": claim.resource.kind,
        "permit_id": claim.permit_id,
        "slots": claim.slots,
        "take": claim.take,
        "lease_us": round(claim.lease * 1e6),
        "host": holder.host,
        "pid": holder.pid,
        "thread": holder.thread,
        "label": holder.label,
        "user": holder.user,
        "process_id": holder.process,
    }


def _fetch(cursor: CursorWrapper, dialect: Dialect, text: str, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
    dialect.execute(cursor, text, parameters)
    row: tuple[Any, ...] | None = cursor.fetchone()
    return row


def _fetch_all(cursor: CursorWrapper, dialect: Dialect, text: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    dialect.execute(cursor, text, parameters)
    return list(cursor.fetchall())
