"""What SQL Server calls the locks of a name, and what its return codes and errors mean to a lock.

Sources: the documentation of ``sp_getapplock``, ``sp_releaseapplock`` and of the error numbers; captures of SQL
Server 2025 for what raises nothing.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass
from typing import Any, Final

from django_sqlsem.core.names import key_of
from django_sqlsem.database.errors import FREETDS_GONE, is_transient
from django_sqlsem.exceptions import BackendError, DeadlockError, SemaphoreError

#: Begins whatever we lock that is neither a slot nor the name itself.
PREFIX: Final = "sqlsem:"
#: Begins the gate of a name; the rest is a digest of this many digits.
GATE: Final = f"{PREFIX}g:"
#: Begins what a transaction holds that is fenced with a permit.
FENCE: Final = f"{PREFIX}f:"
#: Begins what a transaction holds that deletes a name.
DELETION: Final = f"{PREFIX}d:"
DIGEST_UNITS: Final = 20
#: A resource is cut after this many UTF-16 units, without an error.
MAX_UNITS: Final = 255
#: The longest number before a name, with its dash: ``2147483647-``.
_NUMBER_UNITS: Final = 11

_LIKE_A_SLOT: Final = re.compile(r"[0-9]+-")


@dataclass(frozen=True, slots=True)
class LockNames:
    """The resources of one semaphore."""

    #: Slots are ``<slot>-<base>``; every holder has the base itself too, in a mode that its kind of lock says.
    base: str
    #: Its holder is the first in line.
    gate: str

    @property
    def fence(self) -> str:
        """Return what a transaction holds that is fenced with a permit of this name."""
        return f"{FENCE}{self.gate[len(GATE) : len(GATE) + DIGEST_UNITS]}"

    @property
    def deletion(self) -> str:
        """Return what a transaction holds that deletes the name, before it takes all other locks of it."""
        return f"{DELETION}{self.gate[len(GATE) : len(GATE) + DIGEST_UNITS]}"

    def slot(self, number: int) -> str:
        """Return the resource of a slot, counted from 1."""
        return f"{number}-{self.base}"


def units(text: str) -> int:
    """Return the length of a text as SQL Server counts."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


@functools.lru_cache(maxsize=4096)
def lock_names(name: str) -> LockNames:
    """Return the resources of a validated name.

    Slot *i* of ``name`` is ``<i>-<name>``, as in "Counting Semaphore" of the series "Locking and Blocking". A name
    that is itself like a slot of another (``1-x``), that begins like our own locks, or whose slots would pass 255
    UTF-16 units goes by its key instead.
    """
    key = key_of(name)
    # Only the first 32 characters of a resource are shown by the server's views.
    gate = f"{GATE}{key[:DIGEST_UNITS]}"
    too_long = units(name) + _NUMBER_UNITS > MAX_UNITS
    if too_long or _LIKE_A_SLOT.match(name) or name.startswith(PREFIX):
        return LockNames(f"{PREFIX}{key}", gate)
    return LockNames(name, gate)


#: It is not the session that we opened.
FOREIGN: Final = 9
#: The session that asks for an upgrade is no upgradable reader.
NO_READER: Final = -13


class Meaning(enum.Enum):
    """What to do about an error."""

    #: Nothing was done, for a reason that passes by itself: do it again.
    AGAIN = "again"
    #: The session is gone, and with it all its locks.
    SESSION_ENDED = "session ended"
    #: The connection was given up, as nothing came: whether the session still stands is for the server to say.
    SILENT = "silent"
    #: No answer in time. A server that took the driver's word for it has ended the batch, at an unknown point.
    SLOW = "slow"
    #: The login or its rights are not enough.
    FORBIDDEN = "forbidden"
    #: The lock tables are not there.
    NO_TABLES = "no tables"
    #: The stored procedures are not there.
    NO_PROCEDURES = "no procedures"
    OTHER = "other"


#: Return codes of sp_getapplock that are no grant and no simple refusal.
RETURN_CODES: Final[dict[int, tuple[type[SemaphoreError], str]]] = {
    -2: (BackendError, "the server cancelled the lock request (-2)"),
    -3: (DeadlockError, "the server chose this session to break a deadlock (-3); nothing is held"),
    -999: (BackendError, "the server refused the call of sp_getapplock (-999)"),
    FOREIGN: (BackendError, "the session was replaced under its locks: is a connection pool on?"),
    NO_READER: (BackendError, "the session is no upgradable reader: is a connection pool on?"),
}

#: Native error numbers.
NATIVE_ERRORS: Final[dict[int, Meaning]] = {
    1204: Meaning.AGAIN,  # no memory for locks
    1205: Meaning.AGAIN,  # chosen as a deadlock's victim
    1222: Meaning.AGAIN,  # a row stayed locked
    3960: Meaning.AGAIN,  # an update conflict under snapshot isolation
    208: Meaning.NO_TABLES,
    207: Meaning.NO_TABLES,  # a column that a later migration brings
    2812: Meaning.NO_PROCEDURES,
    229: Meaning.FORBIDDEN,
    262: Meaning.FORBIDDEN,
    297: Meaning.FORBIDDEN,
    2759: Meaning.FORBIDDEN,  # to create a schema, after another error
    2760: Meaning.FORBIDDEN,  # of a schema
    2801: Meaning.AGAIN,  # a procedure was altered under a call; what the call has left is freed first
    300: Meaning.FORBIDDEN,
    3906: Meaning.FORBIDDEN,  # the database is read-only
    6102: Meaning.FORBIDDEN,  # KILL
    15151: Meaning.FORBIDDEN,  # to create a schema for another owner
    10928: Meaning.AGAIN,  # Azure SQL: no worker is free
    18456: Meaning.FORBIDDEN,
    596: Meaning.SESSION_ENDED,  # killed
    6005: Meaning.SESSION_ENDED,  # the server is shutting down
    10053: Meaning.SESSION_ENDED,
    10054: Meaning.SESSION_ENDED,
    10060: Meaning.SILENT,
    **dict.fromkeys(FREETDS_GONE, Meaning.SESSION_ENDED),
}

#: Classes of SQLSTATEs, longest first.
SQLSTATES: Final[dict[str, Meaning]] = {
    "40001": Meaning.AGAIN,
    "28": Meaning.FORBIDDEN,
    "08": Meaning.SESSION_ENDED,
    "HYT01": Meaning.SILENT,
    "HYT": Meaning.SLOW,
    "HY008": Meaning.SLOW,
    "IMC": Meaning.SESSION_ENDED,
}

#: No connection was made.
_NEVER_MADE: Final = "08001"
_ERROR_NUMBER: Final = re.compile(r"\((\d+)\)")


def broke_off(error: Exception) -> bool:
    """Whether a connection that had been made was cut, so that the server is there, and the next one may do better."""
    _cause, text = _said(error)
    if "Communication link failure" in text:  # as mssql-python puts it, without a number
        return True
    return meaning(error) is Meaning.SESSION_ENDED and _NEVER_MADE not in text


def _said(error: Exception) -> tuple[Any, str]:
    """Return what a driver raised, and all that it says."""
    if isinstance(error, BackendError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    cause: Any = error.__cause__ or error
    return cause, " ".join(map(str, getattr(cause, "args", ()) or (cause,)))


def meaning(error: Exception) -> Meaning:
    """Return what a driver's error means, or the one that it was made into."""
    cause, text = _said(error)
    for number in _ERROR_NUMBER.findall(text):
        if int(number) in NATIVE_ERRORS:
            return NATIVE_ERRORS[int(number)]
    state = str((getattr(cause, "args", None) or ("",))[0])
    for known, found in SQLSTATES.items():
        if state.startswith(known):
            return found
    if is_transient(cause) or "could not obtain lock" in text:
        return Meaning.AGAIN
    # Of mssql-python, which tells no SQLSTATE. It also says "Communication link failure" of sessions that stand.
    if "imeout expired" in text:
        return Meaning.SILENT
    return Meaning.OTHER


def no_such_table(error: Exception) -> bool:
    """Whether the table or view that a statement asks for is not there. One driver's errors carry no number."""
    text = _said(error)[1]
    return meaning(error) is Meaning.NO_TABLES or "Invalid object name" in text or "does not exist" in text


def failure(alias: str, status: int) -> SemaphoreError:
    """Return the error for a batch's status that is a failure."""
    error, text = RETURN_CODES.get(status, (BackendError, f"unexpected status {status}"))
    if error is DeadlockError:
        return error()
    return error(f"The database {alias!r} failed: {text}")
