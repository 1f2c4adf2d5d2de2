"""What SQL Server's locks and our rows say together: the rows tell who, the locks tell whether.

Where the login may see the server's views (``locks``), they add sessions, queues, and what other programs hold.

The views show at most 32 characters of a resource and a hash that nobody outside can compute, so that two long names
can look alike. Only what is sure is used. Everything here but ``QUERY`` works on its rows alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django_sqlsem.backends.applock.calls import READ
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.core.modes import WHOLE, WRITER
from django_sqlsem.core.names import MAX_SLOTS, key_of, validate_name
from django_sqlsem.database.sqlserver import LockNames, Meaning, lock_names, meaning, no_such_table, units
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState, WaiterSnapshot

if TYPE_CHECKING:
    from django_sqlsem.backends.applock.sessions import LockSession
    from django_sqlsem.core.names import Resource

#: How many UTF-16 units of a resource the views show.
SHOWN_UNITS: Final = 32

# The description as bytes: the view may cut it inside a character. Other programs' CONTEXT_INFO is nobody's business.
QUERY: Final = """
SELECT CAST(l.resource_description AS varbinary(512)) AS described, l.request_mode AS mode,
    l.request_status AS status, l.request_owner_type AS owner, l.request_session_id AS session_id,
    DATEDIFF_BIG(MICROSECOND, '1970-01-01', s.login_time) AS session_us, s.program_name AS program,
    s.host_name AS host, s.host_process_id AS pid, s.login_name AS login,
    CASE WHEN SUBSTRING(s.context_info, 1, 7) = 0x73716C73656D3A
        THEN CAST(SUBSTRING(s.context_info, 8, 32) AS varchar(32)) END AS process, w.waited_ms
FROM sys.dm_tran_locks AS l
LEFT JOIN sys.dm_exec_sessions AS s ON s.session_id = l.request_session_id
LEFT JOIN (
    SELECT session_id, resource_address, MAX(wait_duration_ms) AS waited_ms
    FROM sys.dm_os_waiting_tasks GROUP BY session_id, resource_address
) AS w ON w.resource_address = l.lock_owner_address AND w.session_id = l.request_session_id
WHERE l.resource_type = N'APPLICATION' AND l.resource_database_id = DB_ID() AND l.request_session_id > 0
"""

#: ``<principal>:[<resource>]:(<hash>)``; ``public`` is principal 0.
_DESCRIPTION: Final = re.compile(r"0:\[(.*)\]:\(([0-9a-fA-F]+)\)\s*", re.DOTALL)
_SLOT: Final = re.compile(r"([1-9][0-9]{0,4})-(.+)", re.DOTALL)

_ONLY: Final = "Only holders and waiters that keep a row are shown: "


@dataclass(frozen=True, slots=True)
class Lock:
    """One session's request for one resource: granted, or waiting."""

    #: As much of the resource as is shown.
    shown: str
    hash: str
    mode: str
    granted: bool
    #: ``SESSION`` or ``TRANSACTION``.
    owner: str
    session_id: int
    #: When the session began, in microseconds.
    session_us: int
    program: str
    host: str
    pid: int
    login: str
    #: Which of our processes it belongs to; empty for other programs.
    process: str
    #: For how many seconds it has waited.
    waited: float


class Locks:
    """All application locks of one database at one instant."""

    def __init__(self, locks: Iterable[Lock]) -> None:
        self._by_shown: dict[str, list[Lock]] = {}
        for lock in locks:
            self._by_shown.setdefault(lock.shown, []).append(lock)
        self._waits = any(not lock.granted for found in self._by_shown.values() for lock in found)
        self._slots: dict[str, dict[int, Lock]] = {}
        for shown, found in self._by_shown.items():
            match = _SLOT.fullmatch(shown) if units(shown) < SHOWN_UNITS else None
            exclusive = [lock for lock in found if lock.granted and lock.mode == "X"]
            if match and exclusive and int(match[1]) <= MAX_SLOTS:
                self._slots.setdefault(match[2], {})[int(match[1])] = exclusive[0]

    def of(self, resource: str) -> list[Lock]:
        """Return the requests for a resource. Empty if those for another one could look just the same."""
        if units(resource) < SHOWN_UNITS:
            return self._by_shown.get(resource, [])
        found = self._by_shown.get(_cut(resource), [])
        return found if len({lock.hash for lock in found}) == 1 else []

    def holder(self, resource: str) -> Lock | None:
        """Return who holds a resource that is known to be taken."""
        granted = [lock for lock in self.of(resource) if lock.granted]
        return next((lock for lock in granted if lock.mode == "X"), granted[0] if granted else None)

    def slots(self, names: LockNames) -> Mapping[int, Lock]:
        """Return the slots of a semaphore that are surely taken, whether or not they have rows."""
        return self._slots.get(names.base, {})

    def waiters(self, names: LockNames, slots: Iterable[int], *, known: Iterable[str] = ()) -> list[Lock]:
        """Return one request for each session that waits for a semaphore, the longest wait first.

        Whoever holds the gate is the first in line. ``known``: processes that have said so themselves.
        """
        found: dict[int, Lock] = {}
        # Who declares fewer slots than others has a gate of its own.
        gates = [names.gate, *(shown for shown in self._by_shown if shown.startswith(f"{names.gate}:"))]
        gate = [lock for each in gates for lock in self._by_shown.get(each, ()) if lock.owner == "SESSION"]
        wanted = slots if self._waits else ()
        queued = [lock for slot in wanted for lock in self.of(names.slot(slot)) if not lock.granted]
        told = set(known)
        for lock in (*gate, *queued):
            if not lock.process or lock.process not in told:
                seen = found.get(lock.session_id)
                if seen is None or seen.waited < lock.waited:
                    found[lock.session_id] = lock
        first = {lock.session_id for lock in gate if lock.granted}
        return sorted(found.values(), key=lambda lock: (lock.session_id not in first, -lock.waited, lock.session_id))

    def semaphores(self) -> dict[str, Mapping[int, Lock]]:
        """Return what is surely a semaphore, by name: its holders have the name itself as well, as ours do."""
        return {
            base: slots
            for base, slots in self._slots.items()
            if _is_name(base)
            and any(lock.session_id == other.session_id for other in self.of(base) for lock in slots.values())
        }


def _is_name(text: str) -> bool:
    try:
        return lock_names(validate_name(text)).base == text
    except ValueError:
        return False


def _cut(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass")[: 2 * SHOWN_UNITS].decode("utf-16-le", "surrogatepass")


def parse(description: str) -> tuple[str, str] | None:
    """Return what is shown of a resource, and its hash; ``None`` for what is not the principal ``public``'s."""
    match = _DESCRIPTION.fullmatch(description)
    return (match[1], match[2].lower()) if match else None


def locks(rows: Iterable[Mapping[str, Any]]) -> Locks:
    """Return the locks that the rows of ``QUERY`` tell of."""
    found = []
    for row in rows:
        parsed = parse(bytes(row["described"] or b"").decode("utf-16-le", "surrogatepass"))
        if parsed is not None:
            found.append(
                Lock(
                    *parsed,
                    mode=row["mode"].strip(),
                    granted=row["status"].startswith("GRANT"),  # GRANT, in the documentation GRANTED
                    owner=row["owner"].strip(),
                    session_id=int(row["session_id"]),
                    session_us=int(row["session_us"] or 0),
                    program=(row["program"] or "").strip(),
                    host=(row["host"] or "").strip(),
                    pid=int(row["pid"] or 0),
                    login=(row["login"] or "").strip(),
                    process=row["process"] or "",
                    waited=(row["waited_ms"] or 0) / 1000,
                )
            )
    return Locks(found)


def refusal(error: Exception) -> str:
    """Return a line for operators about why the views could not be read; empty if the session has ended."""
    said = (error.__cause__ or error).args
    what, text = meaning(error), str(said[-1] if said else error)
    if what in (Meaning.SESSION_ENDED, Meaning.SILENT):
        return ""
    if no_such_table(error):
        return f"{_ONLY}this server does not show its locks."
    if what is Meaning.FORBIDDEN or "permission" in text:
        return f"{_ONLY}the login may not VIEW SERVER STATE."
    return f"{_ONLY}{' '.join(text.split())}"


#: What ``READ`` answers: the server's time, names, slots, waiters.
Results: TypeAlias = Sequence[Sequence[dict[str, Any]]]


def wish(names: Collection[str] | None, prefix: str = "", template: str | None = None) -> dict[str, str | None]:
    """Return the parameters of ``READ``."""
    keys = None if names is None else ",".join(sorted({key_of(name) for name in names}))
    return {"keys": keys, "prefix": prefix or None, "template": template}


def read(
    results: Results,
    *,
    names: Collection[str] | None = None,
    prefix: str = "",
    locks: Locks | None = None,
    others: Collection[str] = (),
) -> list[SemaphoreSnapshot]:
    """Return snapshots ordered by name: of ``names`` if given, else of all names that begin with ``prefix``.

    ``others``: names that are not asked for, though they are locked and not in the results.
    """
    times, semaphores, all_slots, all_waiters = results
    clock = RowClock(int(times[0]["now_us"]), "")
    slots, waiters = _by_key(all_slots), _by_key(all_waiters)
    found = [_snapshot(clock, row, slots.get(row["key"], []), waiters.get(row["key"], []), locks) for row in semaphores]
    if locks is not None:
        known = {each.name for each in found}.union(others)
        for name, taken in locks.semaphores().items():
            if name not in known and (name.startswith(prefix) if names is None else name in names):
                found.append(_unrecorded(clock, name, taken, locks))
    return sorted(found, key=lambda each: each.name)


def read_one(session: LockSession, resource: Resource) -> SemaphoreSnapshot | None:
    """Return the snapshot of one name, read on a lock session. Raises ``BackendError``."""
    found = read(session.results(READ, wish([resource.name])), names=[resource.name])
    return next(iter(found), None)


def _by_key(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["semaphore_id"], []).append(row)
    return found


def _snapshot(
    clock: RowClock,
    row: dict[str, Any],
    slots: list[dict[str, Any]],
    waiters: list[dict[str, Any]],
    locks: Locks | None,
) -> SemaphoreSnapshot:
    last_grant, usual, overdue = row.pop("last_grant_us"), row.pop("usual_us"), row.pop("overdue")
    line = row.pop("line", 0)
    semaphore = SemaphoreRow(**row)
    semaphore.last_grant_us = last_grant  # type: ignore[attr-defined]
    name, names = semaphore.name, lock_names(semaphore.name)
    holders = [holder for slot in slots if (holder := _holder(clock, name, slot)) is not None]
    waiting = [clock.waiter(name, WaiterRow(**each)) for each in waiters]
    if locks is not None:
        numbers = {slot["slot"] for slot in slots}
        holders = with_sessions(clock, name, holders, numbers, locks)
        known = [each["process_id"] for each in waiters]
        waiting += [_stranger(clock, name, lock) for lock in locks.waiters(names, sorted(numbers), known=known)]
    elif line and not waiting:
        waiting = [clock.waiter(name, WaiterRow(waiting=1, take=1, queued_us=clock.now))]
    holders = [each for holder in holders for each in _all_slots(holder, slots)]
    usual_hold = float(usual) / 1e6 if usual else None
    return clock.semaphore(semaphore, tuple(holders), tuple(waiting), usual_hold=usual_hold, overdue=int(overdue or 0))


def _holder(clock: RowClock, name: str, row: Mapping[str, Any]) -> HolderSnapshot | None:
    slot = SlotRow(**{key: value for key, value in row.items() if key != "taken"})
    if slot.expires_us is None:
        # A writer that waits for readers to leave has its place by then.
        return _unknown(clock, name, slot.slot) if row["taken"] and slot.slot != WRITER else None
    holder = _unleased(clock.holder(name, slot), SlotState.HELD if row["taken"] else SlotState.STALE)
    return dataclasses.replace(holder, session_id=slot.session_id, session_us=slot.session_us)


def _unleased(holder: HolderSnapshot, state: SlotState = SlotState.HELD) -> HolderSnapshot:
    """Return a holder as what it is here: a session's lock has no lease."""
    return dataclasses.replace(holder, state=state, expires_at=None, lease_left=None)


def _all_slots(holder: HolderSnapshot, slots: Sequence[Mapping[str, Any]]) -> list[HolderSnapshot]:
    """Return the holder once for each slot that it stands for."""
    if holder.mode != WHOLE:
        return [holder]
    others = [slot["slot"] for slot in slots if slot["slot"] > holder.slot and slot["expires_us"] is None]
    return [holder, *(dataclasses.replace(holder, slot=slot) for slot in others)]


def _unknown(clock: RowClock, name: str, slot: int, lock: Lock | None = None) -> HolderSnapshot:
    """Return the holder of a lock without a row, as far as its session is known."""
    row = SlotRow(slot=slot, token=0, host="", pid=0, lease_us=0, label="another program")
    if lock is None:
        return dataclasses.replace(_unleased(clock.holder(name, row)), recorded=False)
    row.token, row.host, row.pid, row.user = lock.session_us, lock.host, lock.pid, lock.login
    row.label = lock.program or row.label
    return dataclasses.replace(
        _unleased(clock.holder(name, row)),
        session_id=lock.session_id,
        session_us=lock.session_us,
        login=lock.login,
        program=lock.program,
        recorded=False,
    )


def _stranger(clock: RowClock, name: str, lock: Lock) -> WaiterSnapshot:
    row = WaiterRow(host=lock.host, pid=lock.pid, label=lock.program, user=lock.login, waiting=1, take=1)
    row.queued_us = clock.now - round(lock.waited * 1e6)
    return dataclasses.replace(clock.waiter(name, row), session_id=lock.session_id)


def with_sessions(
    clock: RowClock, name: str, holders: Sequence[HolderSnapshot], numbers: Collection[int], locks: Locks
) -> list[HolderSnapshot]:
    """Return the holders as the server's views show them, with those of slots that have no row (``numbers`` do)."""
    names = lock_names(name)
    seen = [_seen(clock, names, holder, locks) for holder in holders]
    more = [_unknown(clock, name, slot, lock) for slot, lock in locks.slots(names).items() if slot not in numbers]
    return sorted((*seen, *more), key=lambda holder: holder.slot)


def _seen(clock: RowClock, names: LockNames, holder: HolderSnapshot, locks: Locks) -> HolderSnapshot:
    lock = None if holder.expired else locks.holder(names.slot(holder.slot))
    if lock is None:
        return holder
    if holder.session_id == lock.session_id and holder.session_us in (lock.session_us, 0, None):
        return dataclasses.replace(holder, session_us=lock.session_us, login=lock.login, program=lock.program)
    return _unknown(clock, holder.name, holder.slot, lock)  # the row is somebody else's


def _unrecorded(clock: RowClock, name: str, slots: Mapping[int, Lock], locks: Locks) -> SemaphoreSnapshot:
    """Return what is known of a semaphore that has no rows: its slots are those that were ever seen taken."""
    most = max(slots)
    return clock.semaphore(
        SemaphoreRow(name=name, declared_slots=most),
        tuple(_unknown(clock, name, slot, lock) for slot, lock in sorted(slots.items())),
        tuple(_stranger(clock, name, lock) for lock in locks.waiters(lock_names(name), range(1, most + 1))),
    )
