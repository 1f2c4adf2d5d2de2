"""The calls of the stored procedures in ``sql/``: each is one short ``EXEC``, and one round trip.

The types of the parameters are always those that the procedures declare. Drivers that are not told send each text as
one that is as long as its value (``nvarchar(7)``); a server then prepares the call anew, and keeps one more plan of it,
for each combination of lengths: of names, threads, labels, users.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from django_sqlsem.database.cursors import size_of

SCHEMA: Final = "sqlsem"

#: Lengths are in UTF-16 units, of which a character may take two; what is longer is cut without a word.
TYPES: Final = {
    "age": "bigint",
    "base": "nvarchar(255)",
    "before": "nvarchar(32)",
    "held": "nvarchar(max)",
    "host": "nvarchar(510)",
    "key": "nvarchar(32)",
    "kind": "nvarchar(16)",
    "label": "nvarchar(400)",
    "lock_mode": "nvarchar(8)",
    "mark": "bigint",
    "name": "nvarchar(400)",
    "permit": "nvarchar(32)",
    "pid": "bigint",
    "process": "nvarchar(32)",
    "session_us": "bigint",
    "stamp": "varchar(60)",
    "taken": "nvarchar(max)",
    "template": "nvarchar(400)",
    "thread": "nvarchar(200)",
    "ticket": "nvarchar(32)",
    "token": "bigint",
    "user": "nvarchar(300)",
}


@dataclass(frozen=True, slots=True)
class ProcedureCall:
    """A statement and the names of its parameters, in the order of its ``?`` marks."""

    text: str
    parameters: tuple[str, ...]

    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Return what ``Cursor.setinputsizes()`` takes: type, length or digits, and 0; a length of 0 is ``max``."""
        return _sizes(self.parameters)


@functools.lru_cache(maxsize=100)
def _sizes(parameters: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(size_of(TYPES.get(name, "int")) for name in parameters)


def _call(procedure: str, *parameters: str, always: bool = False) -> ProcedureCall:
    """Return the call of a procedure that answers by one row: ``always``, or when it is asked to."""
    given = [f"@{name} = ?" for name in parameters] + ([] if always else ["@answer = 1"])
    return ProcedureCall(f"EXEC {SCHEMA}.{procedure} {', '.join(given)}", parameters)


_HOLDER: Final = ("host", "pid", "thread", "label", "user", "process")
_PLAIN: Final = ("base", "key", "kind", "slots")
_ROW: Final = ("permit", *_HOLDER, "session_us")
_MORE: Final = ("lock_mode", "take", "timeout", "fair", "head", "mark")

# The usual case has few parameters: each costs a server something, and a stand-in a lot.
TRY: Final = _call("internal_try_1", *_PLAIN, *_ROW, always=True)
TRY_UNRECORDED: Final = _call("internal_try_1", *_PLAIN, always=True)
ACQUIRE: Final = _call("internal_acquire_1", *_PLAIN, *_ROW, *_MORE)
ACQUIRE_UNRECORDED: Final = _call("internal_acquire_1", *_PLAIN, *_MORE)
RELEASE: Final = _call("internal_release_1", "base", "key", "slot", "permit", always=True)
RELEASE_SEVERAL: Final = _call("internal_clean_1", "base", "key", "taken", "permit", "record")
CLEAN: Final = _call("internal_clean_1", "base", "key", "last", "record")
PROVE: Final = _call("internal_prove_1", "held", "record")
FORGET: Final = _call("internal_forget_1", "key", "permit", "slot", "token")
RENAME: Final = _call("internal_rename_1", "key", "before", "permit", "thread", "label", "user")
WAITING: Final = _call("internal_waiting_1", "ticket", "key", "waiting", "age", "take", "lock_mode", *_HOLDER)
BE_WRITER: Final = _call("internal_upgrade_1", "base", "key", "slots", "timeout", "close", "permit", "record")
BE_READER: Final = _call("internal_downgrade_1", "base", "key", "keep", "permit", "record")
FENCE_OFF: Final = _call("internal_fence_1", "key", "taken", "timeout")
DECLARE: Final = _call("internal_declare_1", "key", "name", "kind", "slots", "template")

#: What a call answers as ``result``; below -3 and above -10 the documented numbers of ``sqlsem.acquire``.
TAKEN_AT_ONCE: Final = 0
WAITED: Final = 1
BUSY: Final = -1
ON_HOLD: Final = -4
TOO_FEW: Final = -5
ASK: Final = -9
NEW: Final = -10
OTHER_KIND: Final = -11
NEVER: Final = -12
ROW_FAILED: Final = -14

#: Everything that is sent on a lock session, by name: for people, and for tests.
CALLS: Final = {name: value for name, value in sorted(globals().items()) if isinstance(value, ProcedureCall)}
