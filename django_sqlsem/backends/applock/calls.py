"""The stored procedures in ``sql/``, and their calls: each is one short ``EXEC``, and one round trip.

A call's parameters always have the types that the procedure declares. Drivers that are not told send each text as one
that is as long as its value (``nvarchar(7)``); a server then prepares the call anew, and keeps one more plan of it, for
each combination of lengths: of names, threads, labels, users. Those lengths are in UTF-16 units, of which a character
may take two; what is longer is cut without a word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from django_sqlsem.database.cursors import size_of

SCHEMA: Final = "sqlsem"
_PARAMETER: Final = re.compile(r"^    @(\w+) (\w+(?:\(\w+\))?)", re.MULTILINE)


@functools.cache
def files() -> Mapping[str, str]:
    """Return the text of each procedure's file, by name."""
    folder = resources.files(__package__) / "sql"
    found = {each.name: each.read_text("utf-8") for each in folder.iterdir() if each.name.endswith(".sql")}
    return {name.removesuffix(".sql"): text for name, text in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class ProcedureCall:
    """A statement, the names of its parameters in the order of its ``?`` marks, and whose they are."""

    text: str
    parameters: tuple[str, ...]
    procedure: str

    @functools.cache  # noqa: B019 - there are as many as there are calls
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Return what ``Cursor.setinputsizes()`` takes: type, length or digits, and 0; a length of 0 is ``max``."""
        return tuple(size_of(types(self.procedure)[name]) for name in self.parameters)


@functools.cache
def types(procedure: str) -> dict[str, str]:
    """Return the types of a procedure's parameters. Of whole numbers the value decides: a bit is sent as one too."""
    head = files()[procedure].partition("\nAS\n")[0]
    return {name: declared.replace("bit", "int") for name, declared in _PARAMETER.findall(head)}


def _call(procedure: str, *parameters: str, answer: bool = False) -> ProcedureCall:
    """Return the call of a procedure that answers by a row; ``answer``: only if it is asked to."""
    given = [f"@{name} = ?" for name in parameters] + ["@answer = 1"] * answer
    return ProcedureCall(f"EXEC {SCHEMA}.{procedure} {', '.join(given)}", parameters, procedure)


_HOLDER: Final = ("thread", "label", "user", "session")
_PLAIN: Final = ("base", "key", "kind", "slots")
_ROW: Final = ("permit", *_HOLDER)
_MORE: Final = ("lock_mode", "take", "timeout", "fair", "head", "mark")

# The usual case has few parameters: each costs a server something, and a stand-in a lot.
TRY: Final = _call("internal_try_1", *_PLAIN, *_ROW)
TRY_UNRECORDED: Final = _call("internal_try_1", *_PLAIN)
ACQUIRE: Final = _call("internal_acquire_1", *_PLAIN, *_ROW, *_MORE, answer=True)
ACQUIRE_UNRECORDED: Final = _call("internal_acquire_1", *_PLAIN, *_MORE, answer=True)
RELEASE: Final = _call("internal_release_1", "base", "slot", "key", "permit")
RELEASE_SEVERAL: Final = _call("internal_release_1", "base", "slot", "last", "key", "permit")
RELEASE_UNRECORDED: Final = _call("internal_release_1", "base", "slot")
CLEAN: Final = _call("internal_release_1", "base", "last", "key", "permit")
PROVE: Final = _call("internal_prove_1", "held", "record")
FORGET: Final = _call("internal_forget_1", "key", "permit", "slot", "token")
RENAME: Final = _call("internal_rename_1", "key", "before", "permit", "thread", "label", "user")
WAITING: Final = _call("internal_waiting_1", "ticket", "key", "waiting", "age", "take", "lock_mode", *_HOLDER)
BE_WRITER: Final = _call("internal_upgrade_1", "base", "key", "slots", "timeout", "close", "permit")
BE_READER: Final = _call("internal_downgrade_1", "base", "key", "permit")
FENCE_OFF: Final = _call("internal_fence_1", "key", "taken", "timeout")
DECLARE: Final = _call("internal_declare_1", "key", "name", "kind", "slots", "template", answer=True)
#: Four results, each a list of rows: the server's time, names, slots, waiters. Parameters: see ``reading``.
READ: Final = _call("internal_read_1", "keys", "prefix", "template")

#: What a call answers as ``result``; below -3 and above -10 the documented numbers of ``sqlsem.acquire``.
TAKEN_AT_ONCE: Final = 0
WAITED: Final = 1
BUSY: Final = -1
ON_HOLD: Final = -4
TOO_FEW: Final = -5
NEW: Final = -10
OTHER_KIND: Final = -11
NEVER: Final = -12
ROW_FAILED: Final = -14

#: Everything that is sent on a lock session, by name: for people, and for tests.
CALLS: Final = {name: value for name, value in sorted(globals().items()) if isinstance(value, ProcedureCall)}
