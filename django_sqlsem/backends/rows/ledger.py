"""The count of tokens in a name's row, and what is done to it while that is locked.

Whatever changes the count keeps the name's row locked until it commits, so that a release and a new waiter never miss
one another. Tokens are handed to a waiter by moving them out of the count into the waiter's row, which is ``away`` from
then on. Who deletes that row has them: the waiter, which takes them for good; or, if that gave up or has not come for
them in time, anybody who looks at the name, and puts them back into the count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import IntegrityError

from django_sqlsem.backends.base import LAPSE_US, TOKENS, Grant, Granted
from django_sqlsem.backends.rows.beacons import is_dead
from django_sqlsem.backends.rows.handoff import HEAD, HERE, LEFT, heads
from django_sqlsem.backends.rows.queue import PATIENCE_US
from django_sqlsem.database import bells
from django_sqlsem.exceptions import BackendError, wrong_kind

if TYPE_CHECKING:
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session


T = TypeVar("T")

_CREATE: Final = (
    "sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking, tokens)"
    " VALUES (%(key)s, %(name)s, %(kind)s, %(initial)s, {now}, %(no)s, %(no)s, %(initial)s)"
)
_TOUCH: Final = "UPDATE sqlsem_semaphore SET tokens = tokens WHERE name_key = %(key)s"
_SAVE: Final = "UPDATE sqlsem_semaphore SET tokens = %(tokens)s, declared_us = {now} WHERE name_key = %(key)s"
_STAND: Final = (
    "INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, lease_us, away, waiting, host, pid,"
    " thread, label, user_name, process_id, boot_id, channel, beacon) VALUES (%(permit_id)s, %(key)s,"
    " {now} - %(age_us)s, {now} + %(lasts_us)s, %(take)s, %(lease_us)s, %(away)s, %(waiting)s, %(host)s, %(pid)s,"
    " %(thread)s, %(label)s, %(user)s, %(process_id)s, %(boot_id)s, %(channel)s, %(beacon)s)"
)
_HAND: Final = (
    "UPDATE sqlsem_waiter SET away = %(yes)s, expires_us = {now} + %(lasts_us)s WHERE id = %(waiter)s AND away = %(no)s"
)
ROW: Final = "SELECT id, take, away, expires_us - {now} FROM sqlsem_waiter WHERE ticket = %(permit_id)s"
_LEAVE: Final = "DELETE FROM sqlsem_waiter WHERE ticket = %(permit_id)s AND away = %(no)s"


@functools.cache
def _lock(dialect: Dialect) -> str:
    return (
        f"SELECT kind, tokens, paused FROM sqlsem_semaphore{dialect.lock_hint}"
        f" WHERE name_key = %(key)s{dialect.for_update}"
    )


@functools.cache
def _overdue(dialect: Dialect) -> str:
    """Rows of those who have not come for their tokens, or were waiting and are dead since long."""
    dead = "expires_us < {now} - %(patience_us)s * 4" + (" OR boot_id <> %(boot_id)s" if dialect.boot_id else "")
    return (
        f"SELECT id, take, away FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND NOT ({dialect.live_sql()})"
        f" AND (away = %(yes)s OR {dead})"
    )


class Ledger:
    """The count of one name inside a transaction that has its row locked."""

    def __init__(self, dialect: Dialect, cursor: AnyCursor, parameters: dict[str, Any], here: str) -> None:
        self.dialect = dialect
        self.cursor = cursor
        self.parameters = {"patience_us": PATIENCE_US, "lasts_us": LAPSE_US, "yes": True} | parameters
        self.here = here
        self.tokens = 0
        self.paused = False
        self.changed = False
        #: The channels and grants of those who were served.
        self.served: list[tuple[str, Granted]] = []

    def execute(self, text: str, **values: Any) -> int:
        """Run a statement; return how many rows it changed."""
        self.dialect.execute(self.cursor, text, self.parameters | values)
        return int(self.cursor.rowcount)

    def lock(self) -> str | None:
        """Lock the name's row, and put back what is overdue. Return the name's kind, if there is such a name."""
        if self.dialect.locks_by_writing:
            self.execute(_TOUCH)
        self.execute(_lock(self.dialect))
        found = self.cursor.fetchone()
        if found is None:
            return None
        kind, tokens, paused = found
        if kind == TOKENS:
            self.tokens, self.paused = int(tokens), bool(paused)
            self.execute(_overdue(self.dialect))
            for waiter, take, away in self.cursor.fetchall():
                # It may be taken at this very moment, without this lock: who deletes the row has the tokens.
                if self.execute(LEFT, waiter=waiter) > 0 and away:
                    self.add(int(take))
        return str(kind)

    def add(self, count: int) -> None:
        """Change the count."""
        self.tokens += count
        self.changed = True

    def save(self) -> None:
        """Write the count, if it has changed."""
        if self.changed:
            self.execute(_SAVE, tokens=self.tokens)

    def heads(self) -> list[dict[str, Any]]:
        """Return who waits, in order."""
        self.execute(heads(self.dialect))
        return [dict(zip(HEAD, row, strict=True)) for row in self.cursor.fetchall()]

    def serve(self) -> list[str]:
        """Hand tokens to the oldest waiters, as far as they go: none is passed over. Return who waits on, in order."""
        left = self.heads()
        while left and not self.paused:
            head = left[0]
            if head["beacon"] and is_dead(self.cursor, head["process_id"]):
                self.execute(LEFT, waiter=head["id"])
            elif head["take"] > self.tokens:
                break
            elif self.execute(_HAND, waiter=head["id"]) > 0:  # else it has given up at this very moment
                self.add(-head["take"])
                self._tell(head)
            left.pop(0)
        return [head["ticket"] for head in left]

    def _tell(self, head: dict[str, Any]) -> None:
        channel = HERE if head["process_id"] == self.here else head["channel"]
        granted = granted_as(head["ticket"], head["id"], head["take"], LAPSE_US)
        if self.dialect.notifies and channel not in ("", HERE):
            self.cursor.execute("SELECT pg_notify(%s, %s)", (channel, granted.note()))
        self.served.append((channel, granted))


def granted_as(ticket: str, row_id: int, take: int, left_us: int) -> Granted:
    """Return tokens in a waiter's row as a grant: their number stands for the slot, and there is no fencing token."""
    return Granted(ticket, Grant((take,), (0,), (row_id,)), left_us / 1e6)


class _Attempt:
    """Runs ``work`` on a locked name. ``kind`` is what kind of lock it turned out to be."""

    def __init__(self, dialect: Dialect, parameters: dict[str, Any], work: Callable[[Ledger], Any], here: str) -> None:
        self.dialect, self.parameters, self.work, self.here = dialect, parameters, work, here
        self.kind: str | None = None
        self.result: Any = None
        self.served: list[tuple[str, Granted]] = []
        #: Whether nothing is left to do but to commit.
        self.complete = False

    def __call__(self, cursor: AnyCursor) -> bool | None:
        self.complete = False
        ledger = Ledger(self.dialect, cursor, self.parameters, self.here)
        self.kind = ledger.lock()
        if self.kind != TOKENS:
            return None
        self.result = self.work(ledger)
        ledger.save()
        self.served = ledger.served
        self.complete = True
        return True


def transact(
    session: Session,
    dialect: Dialect,
    resource: Resource,
    parameters: dict[str, Any],
    work: Callable[[Ledger], T],
    *,
    initial: int | None = None,
    here: str = "",
) -> tuple[T | None, tuple[Granted, ...]]:
    """Run ``work`` with the name's row locked, and wake who was served.

    ``initial``: create a new name with so many tokens; ``None``: then there is nothing to do. ``here``: the process
    whose waiters are not woken but returned. Raises ``BackendError``, and ``ImproperlyConfigured`` for another kind.
    """
    parameters = {"key": resource.key} | parameters
    while True:
        attempt = _Attempt(dialect, parameters, work, here)
        try:
            session.transaction(attempt, again=False)
        except BackendError as error:
            if error.stale_connection and not attempt.complete:  # it had died before: nothing was committed
                continue
            raise
        if attempt.kind is not None:
            break
        if initial is None:
            return None, ()
        _create(session, dialect, parameters | {"name": resource.name, "kind": TOKENS, "initial": initial})
    if attempt.kind != TOKENS:
        raise wrong_kind(resource.name, attempt.kind, TOKENS)
    for channel, granted in attempt.served:
        bells.ring(channel, granted.note())
    return attempt.result, tuple(granted for channel, granted in attempt.served if channel == HERE)


def _create(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> None:
    begin, end = dialect.insert_ignore or ("INSERT INTO", "")

    def create(cursor: AnyCursor) -> bool:
        driver: Any = cursor.db
        try:
            dialect.execute(cursor, f"{begin} {_CREATE}{end}", parameters)
        except (IntegrityError, driver.Database.IntegrityError):
            if dialect.insert_ignore:
                raise
        return True

    session.transaction(create)


def stand(ledger: Ledger, *, stay: bool) -> tuple[Granted | None, int]:
    """Take what is wanted if nobody comes first; else take a place, and ``stay`` there.

    Return the grant, or how many are ahead.
    """
    ticket, take = ledger.parameters["permit_id"], ledger.parameters["take"]
    if not ledger.paused and take <= ledger.tokens and not ledger.heads():
        ledger.execute(_STAND, away=True)
        ledger.add(-take)
        return granted_as(ticket, 0, take, LAPSE_US), 0
    ledger.execute(_STAND, away=False, lasts_us=ledger.parameters["patience_us"])
    ahead = ledger.serve()
    mine = next((granted for _, granted in ledger.served if granted.permit_id == ticket), None)
    if mine is not None:
        ledger.served = [each for each in ledger.served if each[1] is not mine]
        return mine, 0
    if not stay:
        ledger.execute(_LEAVE)
    # It is not in line while its own process seems to be dead: the beacon is about to be lit again.
    return None, ahead.index(ticket) if ticket in ahead else len(ahead)


def put_back(ledger: Ledger) -> bool:
    """Give up a place, or what was handed there. Return whether anything was."""
    ledger.execute(ROW)
    found = ledger.cursor.fetchone()
    if found is None or ledger.execute(LEFT, waiter=found[0]) <= 0:
        return False
    if found[2]:
        ledger.add(int(found[1]))
    ledger.serve()  # those behind may be content with less
    return bool(found[2])
