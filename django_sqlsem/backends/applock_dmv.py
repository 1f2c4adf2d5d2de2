"""What the server's own views tell of application locks, to a login that may see them: sessions, queues, strangers.

The views show at most 32 characters of a resource and a hash that nobody outside can compute, so that two long names
can look alike. Only what is sure is used. Everything here but ``QUERY`` works on its rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from django_sqlsem.backends.applock_codes import Meaning, meaning
from django_sqlsem.backends.applock_names import LockNames, lock_names
from django_sqlsem.naming import MAX_SLOTS, validate_name

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

_ONLY: Final = "Only the holders that keep a row are named: "


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
            match = _SLOT.fullmatch(shown) if _units(shown) < SHOWN_UNITS else None
            exclusive = [lock for lock in found if lock.granted and lock.mode == "X"]
            if match and exclusive and int(match[1]) <= MAX_SLOTS:
                self._slots.setdefault(match[2], {})[int(match[1])] = exclusive[0]

    def of(self, resource: str) -> list[Lock]:
        """Return the requests for a resource. Empty if those for another one could look just the same."""
        if _units(resource) < SHOWN_UNITS:
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
        gate = [lock for lock in self.of(names.gate) if lock.owner == "SESSION"]
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


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


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
    # One driver's errors carry no number.
    if what is Meaning.NO_TABLES or "Invalid object name" in text or "does not exist" in text:
        return f"{_ONLY}this server does not show its locks."
    if what is Meaning.FORBIDDEN or "permission" in text:
        return f"{_ONLY}the login may not VIEW SERVER STATE."
    return f"{_ONLY}{' '.join(text.split())}"
