"""The operator's side of application locks, on the alias's ordinary connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from django.db import connections, transaction
from django.db.models import F, Q
from django.db.utils import Error

from django_sqlsem.backends.applock import reading
from django_sqlsem.backends.applock.calls import READ
from django_sqlsem.backends.base import COUNTER, Forgotten, check_slots
from django_sqlsem.backends.clock import LONGEST_DELETION, Idle, RowClock
from django_sqlsem.conf import config
from django_sqlsem.core.identity import MAX_USER_LENGTH, printable
from django_sqlsem.core.names import key_of, validate_slots
from django_sqlsem.database.errors import database_errors
from django_sqlsem.database.raw import results_of
from django_sqlsem.database.sessions import briefly
from django_sqlsem.database.sqlserver import LockNames, lock_names
from django_sqlsem.exceptions import BackendError, SemaphoreError, fenced, kill_needed
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_sqlsem.backends.applock.reading import Locks
    from django_sqlsem.database.sessions import Session
    from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot


#: Takes a lock until the end of the caller's transaction, if it is free: nobody can take it meanwhile.
_TAKE: Final = (
    # An implicit transaction begins with the first look at a table, not with the procedure.
    "SET NOCOUNT ON; DECLARE @rc int, @one int, @resource nvarchar(255) = ?;"
    " SELECT TOP (1) @one = slot FROM sqlsem_slot WITH (NOLOCK);"
    " EXEC @rc = sys.sp_getapplock @Resource = @resource, @LockMode = 'Exclusive', @LockOwner = 'Transaction',"
    " @LockTimeout = 0, @DbPrincipal = 'public'; SELECT @rc AS rc;"
    " SET NOCOUNT OFF;"
)
# At the end of a transaction its locks go one after another, in no known order.
_LET_GO: Final = (
    "SET NOCOUNT ON; DECLARE @rc int, @resource nvarchar(255) = ?;"
    " EXEC @rc = sys.sp_releaseapplock @Resource = @resource, @LockOwner = 'Transaction', @DbPrincipal = 'public';"
    " SELECT @rc AS rc;"
    " SET NOCOUNT OFF;"
)
#: Makes the rows of slots that are missing. As of no kind, it says nothing of what programs declare.
_MAKE_SLOTS: Final = "EXEC sqlsem.internal_declare_1 ?, N'', N'', ?, @answer = 1"
_STANDS: Final = (
    "EXISTS (SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = {id}"
    " AND DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) = {since})"
)
#: Look and end in one batch, as the server gives the number of a session that has ended to another. A login that may
#: not look sees its own session only.
_KILL: Final = (
    f"SET NOCOUNT ON; IF {_STANDS} BEGIN KILL {{id}}; SELECT 1 AS found; END"
    " ELSE SELECT COALESCE((SELECT MIN(0) FROM sys.dm_exec_sessions WHERE session_id <> @@SPID), -1) AS found;"
    " SET NOCOUNT OFF;"
)
_UNSURE: Final = "Session {id} was not ended: {why}, so it cannot be told from a later one with the same number."
#: A statement names this many keys.
_AT_ONCE: Final = 500
#: For this many seconds a login that may not see the server's views is not tried again.
BLIND: Final = 60.0
#: How long a revocation waits for the end of a transaction that is fenced with the permit, in seconds.
FENCED_PATIENCE: Final = 5.0
#: How long the end of a session is waited for, in seconds: it frees its locks once it has rolled back.
ENDING: Final = 3.0
#: A call that waits looks for a pause every 50 ms. After this many seconds none grants a slot that has not seen it.
_ALL_HAVE_SEEN: Final = 0.06


class Operator:
    """Shows what is held, and acts on it."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        #: Whether the server's views could be seen the last time; if not, why, and until when that is believed.
        self._sees = False
        self._blind, self._blind_until = "", 0.0

    def inspect(
        self, names: Collection[str] | None = None, *, prefix: str = "", template: str | None = None
    ) -> list[SemaphoreSnapshot]:
        """Return snapshots ordered by name."""
        with database_errors(self.alias):
            results = self._results(READ.text, list(reading.wish(names, prefix, template).values()))
            locks = self._locks()
            others = self._others(template, locks) if template is not None and locks is not None else ()
            return reading.read(results, names=names, prefix=prefix, locks=locks, others=others)

    def _others(self, template: str, locks: Locks) -> Collection[str]:
        """Return which names that are locked now are not this template's: what has no row was made by none."""
        locked = {key_of(name): name for name in locks.semaphores()}
        if template:
            return locked.values()
        rows = SemaphoreRow.objects.using(self.alias).exclude(template="")
        keys = list(locked)
        return [
            locked[key]
            for start in range(0, len(keys), _AT_ONCE)
            for key in rows.filter(key__in=keys[start : start + _AT_ONCE]).values_list("pk", flat=True)
        ]

    def notes(self) -> list[str]:
        """Say so if the login sees only what is recorded."""
        with database_errors(self.alias):
            if not self._sees and not self._blind:
                self._locks()
        return [self._blind] if self._blind else []

    def _locks(self) -> Locks | None:
        """Return what the server's views show, unless they may not be seen."""
        if not self._sees and (time.monotonic() < self._blind_until or connections[self.alias].in_atomic_block):
            return None  # a first look might fail, and cost the caller's transaction
        try:
            found = reading.locks(self._query(reading.QUERY, ()))
        except Error as error:
            blind = reading.refusal(error)
            if not blind:
                raise
            self._sees, self._blind, self._blind_until = False, blind, time.monotonic() + BLIND
            return None
        self._sees, self._blind = True, ""
        return found

    def _query(self, text: str, parameters: Sequence[Any]) -> list[dict[str, Any]]:
        return next(iter(self._results(text, parameters)), [])

    def _results(self, text: str, parameters: Sequence[Any]) -> list[list[dict[str, Any]]]:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(text.replace("%", "%%").replace("?", "%s") if parameters else text, list(parameters) or None)
            return results_of(cursor)

    def revoke(self, name: str, slot: int, token: int, *, by: str, kill: bool = False) -> HolderSnapshot | None:
        """End the session that has this slot's lock; its other locks go with it.

        Raises ``KillNeededError`` without ``kill``, and if the session is not known.
        """
        with database_errors(self.alias):
            holder = self._holder(name, slot, token)
            if holder is None:
                return None
            if holder.expired:
                return holder if self.purge_slot(name, slot, token) else None
            if holder.session_id is None or not kill:
                raise kill_needed(holder)
            self._await_fences(holder)
            if not holder.session_us:
                raise BackendError(_UNSURE.format(id=holder.session_id, why="when it began is not known"))
            # Its process reads there by whom it was done, of whatever the session held.
            rows = SlotRow.objects.using(self.alias).filter(
                session_id=holder.session_id, session_us=holder.session_us, expires_us__isnull=False
            )
            rows.update(revoked_token=F("token"), revoked_by=printable(by, MAX_USER_LENGTH))
            killed = False
            try:
                killed = self._kill(holder.session_id, holder.session_us)
            finally:
                if not killed:
                    rows.filter(revoked_token=F("token")).update(revoked_token=None, revoked_by="")
            return holder if killed else None

    def _await_fences(self, holder: HolderSnapshot) -> None:
        """Wait for the end of transactions that are fenced with a permit. Raises ``FencedError``."""
        give_up = time.monotonic() + FENCED_PATIENCE
        while self._is_fenced(holder.name, (holder.slot,) if holder.mode else holder.numbers):
            if time.monotonic() > give_up:
                raise fenced(holder.name, holder.slot)
            time.sleep(0.05)

    def _is_fenced(self, name: str, slots: Sequence[int]) -> bool:
        names = lock_names(name)
        asked = [(names.fence, "IntentExclusive"), *((f"{names.fence}:{slot}", "Exclusive") for slot in slots)]
        tests = " + ".join("APPLOCK_TEST(N'public', ?, ?, N'Session')" for _ in asked)
        return bool(
            self._query(f"SELECT {tests} AS free", [each for one in asked for each in one])[0]["free"] < len(asked)
        )

    def request_stop(self, name: str, slot: int, token: int, *, by: str) -> HolderSnapshot | None:
        """Write the request into the row beside the lock: the session's next proof of possession reads it.

        Raises ``SemaphoreError`` where there is no row.
        """
        if not config(self.alias).record:
            raise SemaphoreError(
                "A stop request is kept in the row beside the lock, and here are none: set SQLSEM['RECORD'] to True."
            )
        with database_errors(self.alias):
            holder = self._holder(name, slot, token)
            if holder is None or holder.expired:
                return None
            if not holder.recorded:
                raise SemaphoreError(
                    f"Slot {slot} of {name!r} is held by a program that keeps no row of it, and can't be asked to stop."
                )
            rows = SlotRow.objects.using(self.alias).filter(semaphore=key_of(name), expires_us__isnull=False)
            row = rows.filter(slot=slot, token=token).first()
            if row is None:
                return None
            if holder.stop_by:
                return holder
            same = rows.filter(permit_id=row.permit_id).exclude(stop_token=F("token"))
            same.update(stop_token=F("token"), stop_by=printable(by, MAX_USER_LENGTH))
            # If nothing was updated, it has left, or somebody else was faster to ask it.
            found = self._holder(name, slot, token)
            return found if found is not None and found.stop_by and not found.expired else None

    def _holder(self, name: str, slot: int, token: int) -> HolderSnapshot | None:
        found = self.inspect([name])
        holders = found[0].holders if found else ()
        return next((each for each in holders if (each.slot, each.token) == (slot, token)), None)

    def _kill(self, session_id: int, since: int) -> bool:
        """End a session, and wait until it has ended. Returns whether it still was the one that began then."""
        try:
            found = self._query(_KILL.format(id=int(session_id), since=int(since)), ())[0]["found"]
        except Error as error:
            said = str(error)
            if "6106" in said or "not an active process" in said:
                return False
            if "6102" in said or "permission" in said:
                raise BackendError(
                    f"The login may not end session {session_id}: that takes ALTER ANY CONNECTION, on Azure SQL"
                    " Database KILL DATABASE CONNECTION."
                ) from error
            if "6115" in said:
                raise BackendError("The server ends no session from inside a transaction: do it outside.") from error
            raise
        if found < 0:
            raise BackendError(_UNSURE.format(id=session_id, why="the login may not look at it (VIEW SERVER STATE)"))
        give_up = time.monotonic() + ENDING
        stands = f"SELECT CASE WHEN {_STANDS.format(id=int(session_id), since=int(since))} THEN 1 ELSE 0 END AS found"
        while found and self._query(stands, ())[0]["found"] and time.monotonic() < give_up:
            time.sleep(0.02)
        return bool(found)

    def purge_slot(self, name: str, slot: int, token: int) -> bool:
        """Free a row whose lock is free, and still carries this token: the lock is taken while that is done."""
        with database_errors(self.alias), transaction.atomic(using=self.alias):
            if not self._take(lock_names(name).slot(slot)) or self._is_fenced(name, (slot,)):
                return False
            rows = SlotRow.objects.using(self.alias).filter(semaphore=key_of(name), slot=slot, token=token)
            return bool(rows.filter(expires_us__isnull=False).update(expires_us=None, permit_id=None))

    def purge_idle(self, name: str) -> bool:
        """Delete a name that nobody holds or waits for, unless an operator has set its slots or paused it."""
        with database_errors(self.alias), transaction.atomic(using=self.alias):
            semaphore = SemaphoreRow.objects.using(self.alias).filter(operator_slots=None, paused=False)
            # A count would be lost; and a new name would begin anew.
            semaphore = semaphore.filter(Q(units=None) | Q(units=0, declared_slots=0))
            return self._delete(name, semaphore)

    def forget(self, session: Session, seconds: float, after: str) -> Forgotten:
        """Delete a few names that nobody has used for so long, each in a short transaction."""
        idle, found = Idle.found(session, seconds, after)
        forgotten = [
            briefly(session, lambda _cursor, name=name: self._delete(name, idle.names(), idle), LONGEST_DELETION)  # type: ignore[misc]
            for name in found.names.values()
        ]
        return Forgotten(sum(forgotten), found.after, found.more)

    def _delete(self, name: str, among: QuerySet[SemaphoreRow], idle: Idle | None = None) -> bool:
        """Delete a name, in the open transaction, if nobody uses it or has since ``idle``. Return whether it was."""
        key, names = key_of(name), lock_names(name)
        semaphore, slots = among.filter(key=key), SlotRow.objects.using(self.alias).filter(semaphore=key)
        # Counts have no locks: whoever changes one, or queues for it, waits for its row.
        if not semaphore.update(shrinking=F("shrinking")) or self._counted_for(key):
            return False
        taken: list[str] = []
        ours = self._take_all(names, slots.values_list("slot", flat=True), taken)
        if not ours or (idle is not None and (slots.exclude(idle.free()).exists() or not idle.drop([key]))):
            # A claim that one of these refused looks again once the deletion's lock is free: so that one goes last.
            for resource in reversed(taken[1:]):
                self._query(_LET_GO, (resource,))
            return False
        slots._raw_delete(self.alias)  # without Django's collector, which would read and cascade
        WaiterRow.objects.using(self.alias).filter(semaphore=key)._raw_delete(self.alias)
        return bool(semaphore._raw_delete(self.alias))

    def _counted_for(self, key: str) -> bool:
        """Whether a name is a counter that somebody waits for, or has been handed and not taken."""
        waiters = WaiterRow.objects.using(self.alias).filter(semaphore=key, semaphore__kind=COUNTER)
        return waiters.filter(RowClock.of(self.alias).live() | Q(away=True)).exists()

    def _take_all(self, names: LockNames, slots: Collection[int], taken: list[str]) -> bool:
        # First what tells a claim that it was refused for this; and whoever waits, or holds a slot that has no row, is
        # seen at the gate or at the name itself.
        for resource in (names.deletion, names.gate, names.base, *(names.slot(slot) for slot in slots)):
            if not self._take(resource):
                return False
            taken.append(resource)
        return True

    def _take(self, resource: str) -> bool:
        return int(self._query(_TAKE, (resource,))[0]["rc"]) >= 0

    def set_slots(self, name: str, sizing: dict[str, Any]) -> bool:
        """Set the operator's number; every acquire reads it in turn. ``ValueError`` for a lock with one slot.

        ``sizing``: what is written of it into the name's row.
        """
        slots = sizing["operator_slots"]
        if slots is not None:
            validate_slots(slots)

        def prepare(row: SemaphoreRow) -> None:
            check_slots(name, row.kind, slots)
            # The first in line would leave the gate to make them, and the next one could take a new slot before it.
            if slots is not None:
                self._query(_MAKE_SLOTS, (row.key, slots))

        return self._update(name, prepare, **sizing)

    def set_paused(self, name: str, paused: bool) -> bool:
        """Stop or resume granting; holders are not disturbed."""
        done = self._update(name, paused=paused)
        if done and paused:
            time.sleep(_ALL_HAVE_SEEN)
        return done

    def _update(self, name: str, prepare: Callable[[SemaphoreRow], None] = lambda row: None, **values: Any) -> bool:
        with database_errors(self.alias):
            rows = SemaphoreRow.objects.using(self.alias).filter(Q(key=key_of(name)))
            semaphore = rows.first()
            if semaphore is None:
                return False
            prepare(semaphore)
            return bool(rows.update(**values))
