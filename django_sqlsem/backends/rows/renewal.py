"""Renewals: one statement for all permits, and what became of those that it did not extend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from django_sqlsem.backends.base import Acquired, Renewal
from django_sqlsem.backends.rows.statements import Row, Statements
from django_sqlsem.exceptions import BackendError
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.dialects import Dialect
    from django_sqlsem.database.sessions import Session


#: How many grants one statement names at the most; every database takes lists of this length.
_AT_ONCE: Final = 500

#: By whom a slot's holder was asked to stop; NULL if it was not, or another one was.
_ASKED: Final = "CASE WHEN stop_token = token THEN stop_by END"
# ``{rows}`` and ``{permits}``: the ids of rows and permits; ``{of_name}``: see ``of_name()``.
_THEIRS: Final = "id IN ({rows}) AND permit_id IN ({permits}) AND expires_us IS NOT NULL"
_EXTENDED: Final = "UPDATE sqlsem_slot SET expires_us = {now} + lease_us, beacon = %(beacon)s, suspect_us = NULL"
_EXTEND: Final = f"{_EXTENDED} WHERE {_THEIRS}"
_EXTEND_AND_TELL: Final = f"{_EXTEND} RETURNING id, permit_id, {_ASKED}"
#: The same on PostgreSQL: one text whatever their number, and a row that is locked is passed over, not waited for.
_EXTEND_ARRAYS: Final = f"""{_EXTENDED} WHERE {{of_name}}id IN (
  SELECT s.id FROM sqlsem_slot s WHERE {{of_name}}id IN (SELECT unnest(%(row_ids)s::bigint[]))
  AND permit_id IN (SELECT unnest(%(permit_ids)s::varchar[])) AND expires_us IS NOT NULL
  FOR NO KEY UPDATE OF s SKIP LOCKED
) RETURNING id, permit_id, {_ASKED}"""
#: Which they are, where an UPDATE does not tell.
_TELL: Final = f"SELECT id, permit_id, {_ASKED} FROM sqlsem_slot WHERE {_THEIRS}"
_TELL_UNLOCKED: Final = f"{_TELL} FOR UPDATE SKIP LOCKED"
_FATE: Final = (
    f"SELECT id, permit_id, {_ASKED}, revoked_token, revoked_by FROM sqlsem_slot WHERE {{of_name}}id IN ({{rows}})"
)

#: What rows say, by their ids: whose they are, by whom that holder was asked to stop, and perhaps more.
_Rows: TypeAlias = dict[int, Row]


def renew(session: Session, held: Sequence[Acquired]) -> Renewal:
    """Extend all these grants, some hundred to a statement."""
    renewed: set[str] = set()
    lost: dict[str, Loss] = {}
    asked: dict[str, str] = {}
    failed: BackendError | None = None
    for some in _parts(session, held):
        try:
            rows = _extend(session, some)
            asked |= _asked(some, rows)
            renewed |= {each.permit_id for each in some if _carried(each, rows)}
            doubtful = [each for each in some if each.permit_id not in renewed]
            if doubtful:  # those that are not lost were locked
                rows = _fates(session, doubtful)
                asked |= _asked(doubtful, rows)
                lost |= {each.permit_id: loss for each in doubtful if (loss := _loss(each, rows)) is not None}
        except BackendError as error:
            if not session.dialect.sharded:
                raise
            failed = error  # another name may lie on a server that answers
    if failed is not None and not renewed:
        raise failed
    return Renewal(frozenset(renewed), lost, asked)


def _parts(session: Session, held: Sequence[Acquired]) -> Iterator[Sequence[Acquired]]:
    """Return which of these grants are renewed by one statement."""
    if session.dialect.sharded:
        key = attrgetter("resource.key")
        held = sorted(held, key=key)
        groups: Iterable[Sequence[Acquired]] = [list(of_name) for _, of_name in groupby(held, key)]
    else:
        groups = [held]
    return (some[start : start + _AT_ONCE] for some in groups for start in range(0, len(some), _AT_ONCE))


def of_name(dialect: Dialect, text: str) -> str:
    """Return a text about rows of one name, or of any number of them."""
    return text.replace("{of_name}", "semaphore_key = %(key)s AND " if dialect.sharded else "")


def _extend(session: Session, held: Sequence[Acquired]) -> _Rows:
    """Extend what these grants still carry, and return it."""
    row_ids = [row_id for each in held for row_id in each.grant.row_ids]
    permit_ids = [each.permit_id for each in held]
    parameters = {"beacon": held[0].request.presence.beacon, "row_ids": row_ids, "permit_ids": permit_ids}
    parameters["key"] = held[0].resource.key
    dialect = session.dialect

    def named(text: str, rows: Iterable[int] = row_ids) -> str:
        text = text.replace("{permits}", ",".join(f"'{each}'" for each in permit_ids))  # our own hex digits
        return text.replace("{rows}", ",".join(map(str, rows)))

    def extend(cursor: AnyCursor) -> _Rows:
        text = of_name(dialect, _EXTEND_ARRAYS) if dialect.arrays else named(_EXTEND_AND_TELL)
        return _by_id(Statements(cursor, parameters).rows(text))

    def extend_by_steps(cursor: AnyCursor) -> _Rows:
        statements = Statements(cursor, parameters)
        if not (dialect.for_update and session.connection.features.has_select_for_update_skip_locked):
            statements.change(named(_EXTEND))
            return _by_id(statements.rows(named(_TELL)))
        # One row that someone keeps locked must not cost the other permits their leases.
        found = _by_id(statements.rows(named(_TELL_UNLOCKED)))
        if found:
            statements.change(named(_EXTEND, found))
        return found

    return session.run(extend) if dialect.returning else session.transaction(extend_by_steps) or {}


def fate(session: Session, held: Acquired) -> Loss | None:
    """Return how a grant was lost, or ``None`` if its rows still carry it. Changes nothing."""
    return _loss(held, _fates(session, [held]))


def _fates(session: Session, held: Sequence[Acquired]) -> _Rows:
    text = of_name(session.dialect, _FATE).replace(
        "{rows}", ",".join(str(row_id) for each in held for row_id in each.grant.row_ids)
    )

    def read(cursor: AnyCursor) -> _Rows:
        return _by_id(Statements(cursor, {"key": held[0].resource.key}).rows(text))

    rows = session.run(read)
    # The grant may have been told before this node of a cluster has it.
    if any(_loss(each, rows) for each in held) and session.run(session.dialect.catch_up):
        rows = session.run(read)
    return rows


def _by_id(rows: Sequence[Row]) -> _Rows:
    return {row[0]: row[1:] for row in rows}


def _asked(held: Sequence[Acquired], rows: _Rows) -> dict[str, str]:
    """Return by whom the holders of these grants were asked to stop, by permit id."""
    ours = {each.permit_id for each in held}
    return {row[0]: row[1] for row in rows.values() if row[1] is not None and row[0] in ours}


def _carried(held: Acquired, rows: _Rows) -> bool:
    """Whether all rows of a grant are its own: the next holder of one may be of this process too."""
    return all(rows.get(row_id, (None,))[0] == held.permit_id for row_id in held.grant.row_ids)


def _loss(held: Acquired, rows: _Rows) -> Loss | None:
    for row_id, token in zip(held.grant.row_ids, held.grant.tokens, strict=True):
        if row_id not in rows:
            return Loss(LossReason.EXPIRED, "its row was deleted")
        permit_id, _, revoked_token, revoked_by = rows[row_id]
        if permit_id == held.permit_id:
            continue
        if revoked_token == token:
            return Loss(LossReason.REVOKED, f"revoked by {revoked_by or 'an operator'}", revoked_by or "")
        return Loss(LossReason.EXPIRED, "its lease ran out and its slot was taken or purged")
    return None
