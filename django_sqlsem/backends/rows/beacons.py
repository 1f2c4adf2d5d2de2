"""Taking slots from the dead: a holder whose beacon stays out loses its slot long before its lease runs out.

And telling readers who is dead, though nobody wants the slots; and housekeeping, which frees them.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.base import Ended, Grant
from django_sqlsem.backends.rows.fences import reap
from django_sqlsem.backends.rows.statements import RUN_OUT, Row, Statements, row_of
from django_sqlsem.core.identity import HolderIdentity, process_id
from django_sqlsem.core.names import Resource, resource_for
from django_sqlsem.database import beacons
from django_sqlsem.database.dialects import dialect_for

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from django_sqlsem.backends.base import Request
    from django_sqlsem.core.names import Resource
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session


#: For how long a beacon must have been out, in microseconds: its process has a second to light it again.
_OUT_FOR_US: Final = 1_500_000

_HOLDERS: Final = (
    "SELECT DISTINCT process_id FROM sqlsem_slot WHERE semaphore_key = %(key)s AND beacon = %(yes)s"
    " AND process_id <> %(process_id)s AND {live}"
)
_GONE: Final = (
    "UPDATE sqlsem_slot SET expires_us = {now} WHERE semaphore_key = %(key)s AND process_id = %(dead)s AND {live}"
)
#: The slots that are held, dead holders' too.
_STANDING: Final = "SELECT slot, token FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL"
_BURY: Final = (
    "UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL"
    " WHERE semaphore_key = %(key)s AND id = %(id)s"
)


@functools.cache
def suspects(dialect: Dialect) -> str:
    """How many holding processes have their beacons out, as a column; NULL where SQL cannot tell.

    Slots that have run out and were fenced count too, where a claim does not take them by itself.
    """
    dead = dialect.dead_sql("d.")
    count = (
        "(SELECT COUNT(*) FROM (SELECT DISTINCT s.process_id, s.beacon FROM sqlsem_slot s"
        f" WHERE s.semaphore_key = %(key)s AND {{s.live}}) d WHERE {dead})"
    )
    fenced = (
        " + (SELECT COUNT(*) FROM sqlsem_slot x WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now}"
        " AND x.fenced = x.token)"
    )
    return (count if dead else "NULL") + (fenced if dialect.fence == "sibling" else "")


@functools.cache
def burial(dialect: Dialect) -> tuple[str, str]:
    """End the lease of slots that have been suspect for long enough, and note new suspects. The clock may go back."""
    assert dialect.dead is not None  # noqa: S101
    own = "%(process_id)s::text" if dialect.notifies else "%(process_id)s"
    # Only where its own beacon is seen lit does a process believe that another one's is out.
    dead = (
        f"semaphore_key = %(key)s AND {{live}} AND {dialect.dead_sql('')}"
        f" AND NOT {dialect.dead.replace('{process_id}', own)}"
    )
    unflushed = " RETURNING id{unflushed}" if dialect.unflushed else ""
    return (
        f"UPDATE sqlsem_slot SET expires_us = {{now}} WHERE suspect_us <= {{now}} - %(out_for_us)s AND {dead}",
        "UPDATE sqlsem_slot SET suspect_us = {now} WHERE (suspect_us IS NULL OR suspect_us > {now})"
        f" AND {dead}{unflushed}",
    )


def take_from_suspects(session: Session, dialect: Dialect, request: Request, count: int | None) -> bool:
    """Let slots run out whose holders are gone. Return whether any did. ``count``: what ``suspects`` says."""
    reaped = bool(count) and dialect.fence == "sibling" and reap(session, request.resource.key)
    if not request.presence.beacon or count == 0:
        return reaped
    if count is None and session.connection.vendor != "sqlite":
        return False
    parameters = {"key": request.resource.key, "process_id": request.holder.process}
    return take_from_the_dead(session, dialect, parameters) or reaped


def take_from_the_dead(session: Session, dialect: Dialect, parameters: dict[str, Any]) -> bool:
    """Let the slots of dead processes run out. Return whether any did. Only for a process whose own beacon is lit."""

    def by_sql(cursor: AnyCursor) -> bool:
        statements = Statements(cursor, parameters)
        gone, suspect = burial(dialect)
        taken = statements.change(gone, out_for_us=_OUT_FOR_US) > 0
        statements.change(suspect)
        return taken

    def by_files(cursor: AnyCursor) -> bool:
        """On SQLite: a process has the lock of its file until its very end, so what is out is out for good."""
        statements = Statements(cursor, parameters)
        dead = [each for (each,) in statements.rows(_HOLDERS, yes=True) if is_dead(cursor, each)]
        return sum(statements.change(_GONE, dead=each) for each in dead) > 0

    return session.run(by_files if dialect.dead is None else by_sql)


def free_dead(session: Session, resource: Resource, *, witness: bool) -> bool:
    """Let the slots of the dead run out, and free what has run out. Return whether any was freed."""
    parameters = {"key": resource.key, "process_id": process_id()}
    if witness:
        take_from_the_dead(session, dialect_for(session.connection), parameters)
    return bool(_bury(session, resource.key))


def _bury(session: Session, key: str) -> set[tuple[int, int]]:
    """Free for good what has run out: else a holder that slept could renew it. Return the ids and tokens."""

    def work(cursor: AnyCursor) -> set[tuple[int, int]] | None:
        statements = Statements(cursor, {"key": key})
        rows = statements.rows(RUN_OUT + statements.skip_locked)
        for row_id, _token in rows:
            statements.change(_BURY, id=row_id)
        return {(row_id, token) for row_id, token in rows} or None

    return session.transaction(work) or set()


def standing(session: Session, resource: Resource) -> set[tuple[int, int]]:
    """Return the pairs of slot and token that are held."""
    rows = session.run(lambda cursor: list(Statements(cursor, {"key": resource.key}).rows(_STANDING)))
    return {(slot, token) for slot, token in rows}


def is_dead(cursor: AnyCursor, process_id: str) -> bool:
    """Whether the file of a process on SQLite says that it is dead."""
    if cursor.db.vendor != "sqlite" or not beacons.POSSIBLE:
        return False
    database = beacons.path_of(cursor)  # type: ignore[arg-type]
    return bool(database) and beacons.is_free(database + beacons.SUFFIX, process_id)


# What readers are told of the dead: nobody has to want their slots for that.

#: When each process was asked about last, by ``time.monotonic()``, and whether it was dead, by alias and process.
_asked: dict[tuple[str, str], tuple[float, bool]] = {}
#: A process is asked about at most so often, in seconds; and this many are remembered.
_ASK_EVERY: Final = 1.0
_MOST_ASKED: Final = 10_000
#: A statement asks about this many.
_AT_ONCE: Final = 50


def dead_among(cursor: AnyCursor, processes: Collection[str]) -> frozenset[str]:
    """Return which of these processes' beacons are out, as of a second ago at the most."""
    alias, now, own = cursor.db.alias, time.monotonic(), process_id()
    if len(_asked) > _MOST_ASKED:
        _asked.clear()
    fresh = {
        each: known[1]
        for each in processes
        if (known := _asked.get((alias, each))) is not None and now - known[0] < _ASK_EVERY
    }
    unknown = sorted({each for each in processes if each} - fresh.keys() - {own})
    for start in range(0, len(unknown), _AT_ONCE):
        some = unknown[start : start + _AT_ONCE]
        for each, dead in zip(some, _ask(cursor, some), strict=True):
            fresh[each] = dead
            _asked[alias, each] = (now, dead)
    return frozenset(each for each, dead in fresh.items() if dead)


def _ask(cursor: AnyCursor, processes: Sequence[str]) -> list[bool]:
    dialect = dialect_for(cursor.db)
    if dialect.dead is None:
        return [is_dead(cursor, each) for each in processes]
    # One text for any number: the rest is padded with nobody.
    names = [f"p{nth}" for nth in range(1 if len(processes) == 1 else _AT_ONCE)]
    padded = [*processes, *[""] * (len(names) - len(processes))]
    row = Statements(cursor, dict(zip(names, padded, strict=True))).row(ask_sql(dialect, len(names)))
    return [bool(each) for each in row[: len(processes)]]


@functools.cache
def ask_sql(dialect: Dialect, count: int) -> str:
    """Ask about this many processes."""
    assert dialect.dead is not None  # noqa: S101
    cast = "::text" if dialect.notifies else ""
    each = [
        f"CASE WHEN {dialect.dead.replace('{process_id}', f'%(p{nth})s{cast}')} THEN 1 ELSE 0 END"
        for nth in range(count)
    ]
    return f"SELECT {', '.join(each)}{dialect.dual}"


# Housekeeping: what belongs to the dead is freed though nobody wants it.

#: The names of which slots are taken, by whom, and whether they have run out: of the slots that were used lately.
_TAKEN: Final = (
    "SELECT DISTINCT s.semaphore_key, s.process_id, s.beacon, CASE WHEN {s.free} THEN 1 ELSE 0 END AS ran_out"
    " FROM sqlsem_slot s WHERE s.lease_us > 0 AND s.expires_us IS NOT NULL"
)
_NAME: Final = "SELECT name, kind, template FROM sqlsem_semaphore WHERE name_key = %(key)s"
_GONE_OF: Final = (
    "SELECT id, slot, token, permit_id, acquired_us, expires_us, lease_us, {now}, host, pid, thread, label, user_name,"
    " process_id, lock_mode, boot_id, suspect_us"
    " FROM sqlsem_slot WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL ORDER BY slot"
)


@functools.cache
def taken_sql(dialect: Dialect) -> str:
    """``_TAKEN``, with who is dead, where SQL can tell."""
    dead = dialect.dead_sql("d.")
    told = f"CASE WHEN {dead} THEN 1 ELSE 0 END" if dead else "0"
    return f"SELECT d.semaphore_key, d.process_id, d.beacon, d.ran_out, {told} FROM ({_TAKEN}) d"


def end_dead(session: Session, *, witness: bool, proofs: dict[tuple[int, int], int]) -> tuple[list[Ended], bool]:
    """Free what has run out, and what belongs to dead processes. Return those holds, and whether to look again soon.

    ``witness``: whether this process's own beacon is lit, without which nobody is taken for dead before the end of a
    lease. ``proofs``: what was seen before, kept by the caller: by row and token, when a suspect proved last that it
    lives, as its row does not say that any more once it is let run out.
    """
    dialect = dialect_for(session.connection)
    taken = session.run(lambda cursor: Statements(cursor, {}).rows(taken_sql(dialect)))
    lit = {row[1] for row in taken if row[2] and not row[3]} - {process_id()} if witness else set()
    if dialect.dead is None:
        dead = session.run(lambda cursor: dead_among(cursor, lit)) if lit else frozenset()
    else:
        dead = frozenset(row[1] for row in taken if row[4]) & lit
    keys = {row[0] for row in taken if row[3] or row[1] in dead}
    ended: list[Ended] = []
    soon = False
    for key in sorted(keys):
        found, left = _end_of(session, dialect, key, dead, proofs)
        ended += found
        soon = soon or left
    return ended, soon


_HELD_BY: Final = (
    "SELECT n.name, n.kind, s.permit_id FROM sqlsem_slot s JOIN sqlsem_semaphore n ON n.name_key = s.semaphore_key"
    " WHERE s.process_id = %(process_id)s AND s.permit_id IS NOT NULL AND s.lease_us > 0 AND s.expires_us IS NOT NULL"
)


def held_by(session: Session, process: str) -> list[tuple[Resource, str]]:
    """Return the names of which a process has slots, and the ids of its permits."""
    rows = session.run(lambda cursor: Statements(cursor, {"process_id": process}).rows(_HELD_BY))
    return [(resource_for(name, kind), permit_id) for name, kind, permit_id in rows]


def _end_of(
    session: Session, dialect: Dialect, key: str, dead: Collection[str], proofs: dict[tuple[int, int], int]
) -> tuple[list[Ended], bool]:
    named = row_of(session, _NAME, {"key": key})
    if named is None:
        return [], False
    for row in session.run(lambda cursor: Statements(cursor, {"key": key}).rows(_GONE_OF)):
        proofs.setdefault((row[0], row[2]), row[5] - row[6])
    if dead:
        take_from_the_dead(session, dialect, {"key": key, "process_id": process_id()})
    if dialect.fence == "sibling":
        reap(session, key)
    freed: dict[str, list[Row]] = {}
    left = False
    there = session.run(lambda cursor: Statements(cursor, {"key": key}).rows(_GONE_OF))
    buried = _bury(session, key)
    for row in there:
        if (row[0], row[2]) in buried:
            freed.setdefault(row[3] or str(row[0]), []).append(row)
        else:
            left = left or row[16] is not None  # a suspect: it is for sure in a moment
    ended = []
    for rows in freed.values():
        first = rows[0]
        proof = min(max(proofs.pop((row[0], row[2]), row[5] - row[6]) for row in rows), first[7])
        here = not dialect.boot_id or first[15] == dialect.boot_id  # else nobody knows when that was
        ended.append(
            Ended(
                resource=resource_for(*named[:2]),
                permit_id=first[3] or "",
                grant=Grant(
                    tuple(row[1] for row in rows), tuple(row[2] for row in rows), tuple(row[0] for row in rows)
                ),
                holder=HolderIdentity(*first[8:14]),
                mode=first[14],
                template=named[2] or "",
                ago=max(0.0, (first[7] - proof) / 1e6) if here else 0.0,
                held=max(0.0, (proof - first[4]) / 1e6) if here and first[4] is not None else 0.0,
            )
        )
    return ended, left
