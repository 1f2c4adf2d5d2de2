"""Semaphores on rows: one row per slot, claimed by one conditional UPDATE. For every database but SQL Server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from django_sqlsem.backends.base import (
    TOKENS,
    Acquired,
    Grant,
    Granted,
    Place,
    Queue,
    Released,
    Renewal,
    Request,
    Waited,
)
from django_sqlsem.backends.rows import fences, handoff, statements, tokens
from django_sqlsem.backends.rows import queue as rows_queue
from django_sqlsem.backends.rows.acquire import RowsClaims, claim_parameters, fetch
from django_sqlsem.backends.rows.beacons import take_from_the_dead
from django_sqlsem.backends.rows.reading import read_snapshot
from django_sqlsem.backends.rows.renewal import fate, renew
from django_sqlsem.core.identity import process_id
from django_sqlsem.core.modes import RWLOCK, UPDATE, UPGRADE, WHOLE
from django_sqlsem.database.dialects import Dialect, dialect_for
from django_sqlsem.database.server import note_server

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_sqlsem.backends.base import Presence
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import Loss, SemaphoreSnapshot


class RowsBackend(RowsClaims):
    """The portable backend. The database's row locks keep the invariant; no counter can leak or over-admit."""

    keeps_ranks = True
    keeps_tokens = True
    modes = frozenset({WHOLE, UPDATE, UPGRADE})

    def opened(self, connection: BaseDatabaseWrapper) -> None:
        """Note which life of the server this is."""
        note_server(connection)

    def claim(self, session: Session, request: Request) -> Grant | None:
        """Take slots, or have tokens handed out."""
        if request.resource.kind == TOKENS:
            return tokens.claim(session, request)
        return super().claim(session, request)

    def enrol(self, session: Session, request: Request, place: Place, *, first: bool) -> Waited:
        """Claim if need be, and insert the waiter's row; on PostgreSQL in one statement."""
        if request.resource.kind == TOKENS:
            return tokens.enrol(session, request, place)
        dialect = dialect_for(session.connection)
        parameters = claim_parameters(request) | _place(place)
        grant = None
        if first and request.take == 1 and not request.rank and not request.mode:
            # The place is only taken if the name is in order, so that no look is needed first.
            if dialect.writing_ctes and request.fair:
                waited = self._claim_or_enrol(session, dialect, request, parameters)
                if waited is not None:
                    return waited
                grant = self._look_and_claim(session, dialect, request, parameters, unseen=True)
            else:
                grant = self._take_one(session, dialect, request, parameters)
        elif first:
            grant = self.claim(session, request)
        if grant is not None:
            return Waited((Granted(request.permit_id, grant, request.lease),), at_once=True)
        text = rows_queue.enrol(dialect, bool(request.rank))

        def enrol(cursor: AnyCursor) -> int:
            dialect.execute(cursor, text, parameters)
            return cursor.rowcount

        while session.run(enrol, again=False) <= 0:  # the name is new, or has fewer slots than it should
            grant = self._look_and_claim(session, dialect, request, parameters, unseen=True)
            if grant is not None:
                return Waited((Granted(request.permit_id, grant, request.lease),), at_once=first)
        if request.rank:  # on its own: what is repeated because the database was locked must not take the place twice
            session.run(lambda cursor: dialect.execute(cursor, rows_queue.BACK, parameters))
        # A slot may have been freed between the claim and this, by someone who saw nobody waiting.
        return self._look_around(session, dialect, request, parameters, new=True)

    def wait(self, session: Session, request: Request, place: Place) -> Waited:
        """Refresh the waiter's row, and hand out what is free."""
        if request.resource.kind == TOKENS:
            return tokens.wait(session, request, place)
        dialect = dialect_for(session.connection)
        return self._look_around(session, dialect, request, claim_parameters(request) | _place(place), new=False)

    def _look_around(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any], *, new: bool
    ) -> Waited:
        queue = session.run(lambda cursor: rows_queue.view(dialect, cursor, parameters, keep=not new))
        granted: tuple[Granted, ...] = ()
        if queue is not None and queue.gone:  # then nobody would hand anything over: it comes anew, and makes the name
            session.run(lambda cursor: dialect.execute(cursor, rows_queue.LEAVE, parameters))
            queue = None
        if queue is not None:
            # What a mode waits for is not told by how many slots are free.
            enough = not request.mode and queue.free >= request.take
            taken = not enough and self._take_from_the_dead(session, dialect, request, queue.suspects)
            if queue.free or taken or request.mode:
                granted = handoff.grant(session, dialect, parameters)
        if queue is None:
            mine = self.granted(session, request)
            granted = (mine,) if mine else ()
            if mine is None:
                session.run(lambda cursor: rows_queue.sweep(dialect, cursor, parameters))
        return Waited(granted, queue)

    def granted(self, session: Session, request: Request) -> Granted | None:
        """Read the slots that carry the waiter's permit id."""
        if request.resource.kind == TOKENS:
            return tokens.granted(session, request)
        dialect = dialect_for(session.connection)
        parameters = {"key": request.resource.key, "permit_id": request.permit_id}
        return session.run(lambda cursor: rows_queue.mine(dialect, cursor, parameters))

    def leave(self, session: Session, request: Request) -> None:
        """Delete the waiter's row. If it is not there any more, it was granted: then hand that on."""
        if request.resource.kind == TOKENS:
            tokens.discard(session, request.resource, request.permit_id)
            return
        dialect = dialect_for(session.connection)
        parameters = {"permit_id": request.permit_id}

        def leave(cursor: AnyCursor) -> int:
            dialect.execute(cursor, rows_queue.LEAVE, parameters)
            return cursor.rowcount

        if session.run(leave) > 0:
            if request.take != 1:  # those behind it may be content with less
                self.hand_out(session, request.resource)
        else:
            self.discard(session, request.resource, request.permit_id)

    def step_aside(self, session: Session, request: Request, estimate: Callable[[int], float]) -> float:
        """Write the task's row, which is away."""
        dialect = dialect_for(session.connection)
        parameters = claim_parameters(request)
        return session.run(lambda cursor: rows_queue.step_aside(dialect, cursor, parameters, estimate))

    def keeps_place(self, session: Session, request: Request) -> bool:
        """Look for the task's row."""
        dialect = dialect_for(session.connection)

        def look(cursor: AnyCursor) -> bool:
            dialect.execute(cursor, rows_queue.KEPT, {"rank": request.rank})
            return cursor.fetchone() is not None

        return session.run(look)

    def hand_rank_on(self, session: Session, request: Request, heir: str) -> None:
        """Write the other rank into the task's row."""
        dialect = dialect_for(session.connection)
        parameters = {"rank": request.rank, "heir": heir}
        session.run(lambda cursor: dialect.execute(cursor, rows_queue.HAND_ON, parameters))

    def release(self, session: Session, held: Acquired, *, wanted: bool = False, hand_on: bool = True) -> Released:
        """Free the rows that still carry the permit's id, and hand them on."""
        if held.resource.kind == TOKENS:  # they were handed over, and nobody took them
            return Released(tokens.discard(session, held.resource, held.permit_id))
        dialect = dialect_for(session.connection)
        parameters = {
            "key": held.resource.key,
            "permit_id": held.permit_id,
            "process_id": process_id(),
            "durable": held.request.durable,
            "witness": held.request.presence.beacon,
            "bells": held.request.presence.bells,
        }
        if not held.request.mode:  # else they may be thousands, and are known by the permit's id
            parameters |= {f"row{number}": row_id for number, row_id in enumerate(held.grant.row_ids)}
        parameters |= {"slot0": held.grant.slots[0], "token0": held.grant.tokens[0]}
        rows = len(held.grant.row_ids)
        if held.request.mode and not hand_on:
            return Released(session.run(lambda cursor: _free_all(dialect, cursor, parameters)))
        if (held.request.mode or held.resource.kind == RWLOCK) and hand_on:
            released = handoff.release_by_steps(
                session, dialect, parameters, alone=bool(held.request.mode) or rows > 1, wanted=wanted
            )
            return Released(*released)
        if not hand_on:
            return Released(handoff.free(session, dialect, parameters, rows))
        return Released(*handoff.release(session, dialect, parameters, rows, wanted=wanted))

    def discard(self, session: Session, resource: Resource, permit_id: str) -> bool:
        """Free whatever rows carry the permit's id, its place in the queue included."""
        if resource.kind == TOKENS:
            return tokens.discard(session, resource, permit_id)
        dialect = dialect_for(session.connection)
        parameters = {"key": resource.key, "permit_id": permit_id}

        def discard(cursor: AnyCursor) -> bool:
            dialect.execute(cursor, rows_queue.LEAVE, parameters)
            return _free_all(dialect, cursor, parameters)

        freed = session.run(discard)
        if freed:
            self.hand_out(session, resource)
        return freed

    def hand_out(self, session: Session, resource: Resource) -> None:
        """Hand out what is free as if from elsewhere: this process's own waiters are woken like any others."""
        if resource.kind == TOKENS:
            tokens.hand_out(session, resource)
            return
        parameters = {"key": resource.key, "process_id": "", "durable": True, "by_steps": resource.kind == RWLOCK}
        handoff.grant(session, dialect_for(session.connection), parameters)

    def add(
        self,
        session: Session,
        resource: Resource,
        count: int,
        *,
        initial: int,
        presence: Presence,
        hand_on: bool = True,
    ) -> tuple[Granted, ...]:
        """Add to the count in the name's row, and hand tokens to the oldest waiters."""
        here, witness = process_id(), presence.beacon
        return tokens.add(session, resource, count, initial=initial, witness=witness, here=here, hand_on=hand_on)

    def take(self, session: Session, permit_id: str) -> bool:
        """Delete the waiter's row that the tokens were handed to."""
        return tokens.take(session, permit_id)

    def renew(self, session: Session, held: Sequence[Acquired]) -> Renewal:
        """Extend all these grants, some hundred to a statement."""
        return renew(session, dialect_for(session.connection), held)

    def snapshot(self, session: Session, resource: Resource) -> SemaphoreSnapshot | None:
        """Read one name in three statements on our own connection, whatever the caller's transaction is up to."""
        return read_snapshot(session, dialect_for(session.connection), resource)

    def free_dead(self, session: Session, resource: Resource, *, witness: bool) -> None:
        """Let the slots of the dead run out, and free what has run out: else a holder that slept could renew it."""
        dialect = dialect_for(session.connection)
        parameters = {"key": resource.key, "process_id": process_id()}
        if witness:
            take_from_the_dead(session, dialect, parameters)

        def free(cursor: AnyCursor) -> int:
            dialect.execute(cursor, statements.FREE_DEAD + dialect.free_sql(), parameters)
            return cursor.rowcount

        if session.run(free) > 0:
            self.hand_out(session, resource)

    def standing(self, session: Session, resource: Resource) -> set[tuple[int, int]]:
        """Read the rows that are taken."""
        dialect = dialect_for(session.connection)

        def read(cursor: AnyCursor) -> set[tuple[int, int]]:
            dialect.execute(cursor, statements.STANDING, {"key": resource.key})
            return {(slot, token) for slot, token in cursor.fetchall()}

        return session.run(read)

    def fence(self, caller: BaseDatabaseWrapper, session: Session, held: Acquired) -> bool:
        """Lock, in the caller's transaction, what whoever takes the slots has to lock."""
        return fences.fence(caller, session, held)

    def keeps_renewals_out(self, caller: BaseDatabaseWrapper) -> bool:
        """Whether there is one writer."""
        return dialect_for(caller).fence == "writer"

    def extend(self, caller: BaseDatabaseWrapper, held: Acquired) -> bool:
        """Renew the rows as part of the caller's transaction."""
        return fences.extend(caller, held)

    def fate(self, session: Session, held: Acquired) -> Loss | None:
        """Read whose the rows are."""
        return fate(session, dialect_for(session.connection), held)

    def fenced_sql(self, caller: BaseDatabaseWrapper, held: Acquired) -> tuple[str, list[Any]]:
        """Return that the rows are the permit's and have not run out."""
        return fences.fenced_sql(caller, held)

    def _claim_or_enrol(
        self, session: Session, dialect: Dialect, request: Request, parameters: dict[str, Any]
    ) -> Waited | None:
        text = rows_queue.claim_or_enrol(dialect, request.durable)
        row = session.run(lambda cursor: fetch(cursor, dialect, text, parameters), again=False)
        if row is None:
            return None
        if row[0] is None:
            return Waited((), Queue(ahead=int(row[4])))
        self._declare(session, dialect, request, parameters, row[3])
        granted = Granted(request.permit_id, Grant((row[1],), (row[2],), (row[0],)), request.lease)
        return Waited((granted,), at_once=True)


def _free_all(dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any]) -> bool:
    dialect.execute(cursor, statements.DISCARD, parameters)
    return cursor.rowcount > 0


def _place(place: Place) -> dict[str, Any]:
    return {"arrived_us": round(place.arrived * 1e6), "waiting": place.waiting, "patience_us": rows_queue.PATIENCE_US}
