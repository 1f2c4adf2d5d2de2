"""What SQL Server's locks and our rows say together: the rows tell who, the locks tell whether.

Where the login may see the server's views (``locks``), they add sessions, and what other programs hold and wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from django_sqlsem.backends.applock_dmv import Lock, Locks
from django_sqlsem.backends.applock_names import PREFIX, LockNames, lock_names
from django_sqlsem.backends.applock_sql import NOW
from django_sqlsem.backends.row_clock import RowClock, stop_by
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.modes import WHOLE, WRITER
from django_sqlsem.naming import key_of
from django_sqlsem.snapshots import HolderSnapshot, SemaphoreSnapshot, SlotState, WaiterSnapshot

#: Runs a query with ``?`` marks and returns its rows by column.
Query: TypeAlias = Callable[[str, Sequence[Any]], list[dict[str, Any]]]

#: How many names one query asks for.
CHUNK: Final = 200

_SEMAPHORES: Final = (
    "SELECT m.name_key AS [key], m.name, m.kind, m.declared_slots, m.declared_us, m.operator_slots, m.paused,"
    f" m.other_slots, m.other_us, m.tokens, {NOW} AS now_us,"
    " (SELECT MAX(acquired_us) FROM sqlsem_slot WHERE semaphore_key = m.name_key) AS last_grant_us,"
    " (SELECT AVG(held_us) FROM sqlsem_slot WHERE semaphore_key = m.name_key AND held_us > 0) AS usual_us,"
    " (SELECT SUM(take) FROM sqlsem_waiter WHERE semaphore_key = m.name_key AND away = 1"
    f" AND expires_us <= {NOW}) AS overdue"
    " FROM sqlsem_semaphore m WHERE {where} ORDER BY m.name"
)

_TAKEN: Final = (
    "CASE WHEN APPLOCK_MODE(N'public', {resource}, N'Session') <> N'NoLock' THEN 1"
    " WHEN APPLOCK_TEST(N'public', {resource}, N'Exclusive', N'Session') = 0 THEN 1 ELSE 0 END"
)
#: Names that go by a digest are asked about one by one.
_PLAIN: Final = f"m.name NOT LIKE N'[0-9]%' AND m.name NOT LIKE N'{PREFIX}%' AND DATALENGTH(m.name) <= 480"
_RESOURCE: Final = f"CASE WHEN {_PLAIN} THEN CONCAT(s.slot, N'-', m.name) ELSE N'{PREFIX}' END"

_SLOTS: Final = (
    "SELECT s.semaphore_key AS semaphore_id, s.slot, s.token, s.acquired_us, s.expires_us, s.lease_us, s.host, s.pid,"
    " s.thread, s.label, s.user_name AS [user], s.session_id, s.session_us, s.lock_mode AS mode,"
    " s.stop_token, s.stop_by,"
    f" CASE WHEN {_PLAIN} THEN {_TAKEN.format(resource=_RESOURCE)} END AS taken"
    " FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key WHERE {where} ORDER BY s.slot"
)

_WAITERS: Final = (
    "SELECT w.semaphore_key AS semaphore_id, w.queued_us, w.waiting, w.take, w.host, w.pid, w.thread, w.label,"
    " w.user_name AS [user], w.process_id, w.lock_mode AS mode"
    " FROM sqlsem_waiter w JOIN sqlsem_semaphore m ON m.name_key = w.semaphore_key"
    f" WHERE {{where}} AND w.away = 0 AND w.expires_us > {NOW} ORDER BY w.queued_us, w.id"
)


def read(
    query: Query, *, names: Collection[str] | None = None, prefix: str = "", locks: Locks | None = None
) -> list[SemaphoreSnapshot]:
    """Return snapshots ordered by name: of ``names`` if given, else of all names that begin with ``prefix``."""
    if names is None:
        # LIKE and "=" would disregard blanks at the end.
        where, parameters = ("CHARINDEX(?, m.name) = 1", (prefix,)) if prefix else ("1 = 1", ())
        found = _read(query, where, parameters, locks)
    else:
        wanted, found = sorted(set(names)), []
        for start in range(0, len(wanted), CHUNK):
            some = [key_of(name) for name in wanted[start : start + CHUNK]]
            found += _read(query, f"m.name_key IN ({', '.join('?' * len(some))})", some, locks)
    if locks is not None:
        known = {each.name for each in found}
        for name, slots in locks.semaphores().items():
            if name not in known and (name.startswith(prefix) if names is None else name in names):
                found.append(_unrecorded(query, name, slots, locks))
    return sorted(found, key=lambda each: each.name)


def _read(query: Query, where: str, parameters: Sequence[Any], locks: Locks | None) -> list[SemaphoreSnapshot]:
    semaphores = query(_SEMAPHORES.format(where=where), parameters)
    if not semaphores:
        return []
    slots, waiters = (
        _by_key(query(_SLOTS.format(where=where), parameters)),
        _by_key(query(_WAITERS.format(where=where), parameters)),
    )
    return [_snapshot(query, row, slots.get(row["key"], []), waiters.get(row["key"], []), locks) for row in semaphores]


def _by_key(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["semaphore_id"], []).append(row)
    return found


def _snapshot(
    query: Query,
    row: dict[str, Any],
    slots: list[dict[str, Any]],
    waiters: list[dict[str, Any]],
    locks: Locks | None,
) -> SemaphoreSnapshot:
    clock = RowClock(int(row.pop("now_us")), "")
    last_grant, usual, overdue = row.pop("last_grant_us"), row.pop("usual_us"), row.pop("overdue")
    semaphore = SemaphoreRow(**row)
    semaphore.last_grant_us = last_grant  # type: ignore[attr-defined]
    name, names = semaphore.name, lock_names(semaphore.name)
    holders = [holder for slot in slots if (holder := _holder(query, clock, name, names, slot)) is not None]
    waiting = [clock.waiter(name, WaiterRow(**each)) for each in waiters]
    if locks is not None:
        numbers = {slot["slot"] for slot in slots}
        holders = with_sessions(clock, name, holders, numbers, locks)
        known = [each["process_id"] for each in waiters]
        waiting += [_stranger(clock, name, lock) for lock in locks.waiters(names, sorted(numbers), known=known)]
    holders = [each for holder in holders for each in _all_slots(holder, slots)]
    usual_hold = float(usual) / 1e6 if usual else None
    return clock.semaphore(semaphore, tuple(holders), tuple(waiting), usual_hold=usual_hold, overdue=int(overdue or 0))


def _holder(
    query: Query, clock: RowClock, name: str, names: LockNames, row: Mapping[str, Any]
) -> HolderSnapshot | None:
    taken = row["taken"]
    if taken is None:
        taken = is_taken(query, names.slot(row["slot"]))
    values = {key: value for key, value in row.items() if key != "taken"}
    slot = SlotRow(**values)
    if slot.expires_us is None:
        # A writer that waits for readers to leave has its place by then.
        return _unknown(clock, name, slot.slot) if taken and slot.slot != WRITER else None
    age = max(0.0, clock.age(slot.acquired_us, ""))
    return HolderSnapshot(
        name=name,
        slot=slot.slot,
        state=SlotState.HELD if taken else SlotState.STALE,
        token=slot.token,
        host=slot.host,
        pid=slot.pid,
        thread=slot.thread,
        label=slot.label,
        user=slot.user,
        acquired_at=clock.at(age),
        expires_at=None,
        age=age,
        lease_left=None,
        session_id=slot.session_id,
        session_us=slot.session_us,
        mode=slot.mode,
        stop_by=stop_by(slot),
    )


def _all_slots(holder: HolderSnapshot, slots: Sequence[Mapping[str, Any]]) -> list[HolderSnapshot]:
    """Return the holder once for each slot that it stands for."""
    if holder.mode != WHOLE:
        return [holder]
    others = [slot["slot"] for slot in slots if slot["slot"] > holder.slot and slot["expires_us"] is None]
    return [holder, *(dataclasses.replace(holder, slot=slot) for slot in others)]


def _unknown(clock: RowClock, name: str, slot: int, lock: Lock | None = None) -> HolderSnapshot:
    """Return the holder of a lock without a row, as far as its session is known."""
    return HolderSnapshot(
        name=name,
        slot=slot,
        state=SlotState.HELD,
        token=lock.session_us if lock else 0,
        host=lock.host if lock else "",
        pid=lock.pid if lock else 0,
        thread="",
        label=(lock.program if lock else "") or "another program",
        user=lock.login if lock else "",
        acquired_at=clock.wall,
        expires_at=None,
        age=0.0,
        lease_left=None,
        session_id=lock.session_id if lock else None,
        session_us=lock.session_us if lock else None,
        login=lock.login if lock else "",
        program=lock.program if lock else "",
        recorded=False,
    )


def _stranger(clock: RowClock, name: str, lock: Lock) -> WaiterSnapshot:
    return WaiterSnapshot(
        name=name,
        host=lock.host,
        pid=lock.pid,
        thread="",
        label=lock.program,
        user=lock.login,
        waiting_since=clock.at(lock.waited),
        age=lock.waited,
        waiting=1,
        take=1,
        session_id=lock.session_id,
    )


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


def _unrecorded(query: Query, name: str, slots: Mapping[int, Lock], locks: Locks) -> SemaphoreSnapshot:
    """Return what is known of a semaphore that has no rows: its slots are those that were ever seen taken."""
    clock = RowClock(int(query(f"SELECT {NOW} AS now_us", ())[0]["now_us"]), "")
    most = max(slots)
    return clock.semaphore(
        SemaphoreRow(name=name, declared_slots=most),
        tuple(_unknown(clock, name, slot, lock) for slot, lock in sorted(slots.items())),
        tuple(_stranger(clock, name, lock) for lock in locks.waiters(lock_names(name), range(1, most + 1))),
    )


def is_taken(query: Query, resource: str) -> bool:
    """Return whether any session holds a resource exclusively."""
    return bool(query(f"SELECT {_TAKEN.format(resource='?')} AS taken", (resource, resource))[0]["taken"])
