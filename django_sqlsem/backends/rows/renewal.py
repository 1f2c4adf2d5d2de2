"""Renewals of the rows backend: one statement for all permits, and what became of those it did not extend.

Tables that know nothing of wishes yet: code that is newer than them keeps its permits, and is asked nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from django.db import Error as DjangoDatabaseError

from django_sqlsem.backends.base import Acquired, Renewal
from django_sqlsem.backends.rows import statements
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database.dialects import Dialect
from django_sqlsem.database.errors import is_missing_column
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.database.cursors import AnyCursor
    from django_sqlsem.database.sessions import Session


logger = logging.getLogger("django_sqlsem")

T = TypeVar("T")

#: Whether the columns have come meanwhile is looked at so often, in seconds.
AGAIN: Final = 60.0

_said: set[str] = set()


def asking(cursor: AnyCursor, send: Callable[[bool], T]) -> T:
    """Call ``send(True)`` for a statement that reads wishes too; ``send(False)`` where their columns are missing."""
    connection: Any = cursor.db
    if (until := getattr(connection, "sqlsem_unasked_until", 0.0)) and boot_now() < until:
        return send(False)
    try:
        return send(True)
    except (connection.Database.Error, DjangoDatabaseError) as error:
        # Caught here, as on an error that a session hears of it throws its connection away.
        if not is_missing_column(error, "stop_"):
            raise
    connection.sqlsem_unasked_until = boot_now() + AGAIN
    if connection.alias not in _said:
        _said.add(connection.alias)
        message = (
            "Nobody can be asked to stop, as the lock tables of %r are older than this code: run manage.py migrate."
        )
        logger.warning(message, connection.alias)
    return send(False)


#: How many grants one statement names at the most; every database takes lists of this length.
RENEW_AT_ONCE: Final = 500


def renew(session: Session, dialect: Dialect, held: Sequence[Acquired]) -> Renewal:
    """Extend all these grants, some hundred to a statement."""
    told = _Told()
    for start in range(0, len(held), RENEW_AT_ONCE):
        _renew_some(session, dialect, held[start : start + RENEW_AT_ONCE], told)
    return Renewal(frozenset(told.renewed), told.lost, told.asked)


#: What rows say, by their ids: whose they are, by whom that holder was asked to stop, and perhaps more.
_Rows: TypeAlias = dict[int, tuple[Any, ...]]


@dataclass(slots=True)
class _Told:
    """What the database has said of grants, by permit id."""

    renewed: set[str] = field(default_factory=set)
    lost: dict[str, Loss] = field(default_factory=dict)
    #: Who asks their holders to stop.
    asked: dict[str, str] = field(default_factory=dict)

    def note_asked(self, held: Sequence[Acquired], rows: _Rows) -> None:
        """Note by whom holders were asked to stop."""
        wishes = {row[0]: row[1] for row in rows.values() if row[1] is not None}
        if wishes:
            self.asked.update((each.permit_id, wishes[each.permit_id]) for each in held if each.permit_id in wishes)


def _renew_some(session: Session, dialect: Dialect, held: Sequence[Acquired], told: _Told) -> None:
    row_ids = _row_ids(held)
    permit_ids = ",".join(f"'{each.permit_id}'" for each in held)  # our own hex digits
    wanted = sum(len(each.grant.row_ids) for each in held)
    beacon = {"beacon": held[0].request.presence.beacon}

    def extend(cursor: AnyCursor, asks: bool) -> _Rows | None:
        if dialect.arrays:
            parameters: dict[str, Any] = beacon | {
                "row_ids": [row_id for each in held for row_id in each.grant.row_ids],
                "permit_ids": [each.permit_id for each in held],
            }
            text = statements.renew_arrays(dialect)
        else:
            parameters = beacon
            counted = asks and not dialect.returning
            known = (_row_ids([each for each in held if each.stop_told]) or "0") if counted else ""
            text = statements.renew(dialect, row_ids, permit_ids, known)
        dialect.execute(cursor, text if asks else statements.unasked(text), parameters)
        if dialect.returning:
            return _by_id(cursor)
        if cursor.rowcount < wanted:
            return None
        return {row_id: (each.permit_id, None) for each in held for row_id in each.grant.row_ids}

    def extend_unlocked(cursor: AnyCursor, asks: bool) -> list[_Rows | None]:
        if not (dialect.for_update and session.connection.features.has_select_for_update_skip_locked):
            return [extend(cursor, asks)]
        # One row that someone keeps locked must not cost the other permits their leases.
        text = statements.UNLOCKED % (row_ids, permit_ids)
        dialect.execute(cursor, text if asks else statements.unasked(text), {})
        found = _by_id(cursor)
        if found:
            dialect.execute(cursor, statements.renew(dialect, ",".join(map(str, found)), permit_ids), beacon)
        return [found]

    if dialect.returning:
        extended = session.run(lambda cursor: asking(cursor, partial(extend, cursor)))
    else:
        [extended] = session.transaction(lambda cursor: asking(cursor, partial(extend_unlocked, cursor))) or [None]
    if extended is not None:
        told.renewed.update(each.permit_id for each in held if _carried(each, extended))
        told.note_asked(held, extended)
    doubtful = [each for each in held if each.permit_id not in told.renewed]
    if not doubtful:
        return
    passed_over = _ask_fate(session, dialect, doubtful, extended is not None, told)
    if passed_over:
        _renew_some(session, dialect, [replace(each, stop_told=True) for each in passed_over], told)


def fate(session: Session, dialect: Dialect, held: Acquired) -> Loss | None:
    """Return how a grant was lost, or ``None`` if its rows still carry it. Changes nothing."""
    told = _Told()
    _ask_fate(session, dialect, [held], True, told)
    return told.lost.get(held.permit_id)


def _ask_fate(session: Session, dialect: Dialect, held: Sequence[Acquired], known: bool, told: _Told) -> list[Acquired]:
    """Find out what became of grants that were not extended, or may not have been (``known`` is false).

    Returns those that were passed over, since their holders did not know yet that they are asked to stop.
    """

    def read(cursor: AnyCursor) -> _Rows:
        text = statements.FATE % _row_ids(held)
        asking(cursor, lambda asks: dialect.execute(cursor, text if asks else statements.unasked(text), {}))
        return _by_id(cursor)

    rows = session.run(read)
    told.note_asked(held, rows)
    passed_over = []
    for each in held:
        losses = [
            _loss(token, rows.get(row_id))
            for row_id, token in zip(each.grant.row_ids, each.grant.tokens, strict=True)
            if rows.get(row_id, (None,))[0] != each.permit_id
        ]
        if losses:
            told.lost[each.permit_id] = losses[0]
        elif not known and each.permit_id in told.asked and not each.stop_told:
            passed_over.append(each)
        elif not known:  # the statement only told how many rows it extended: this one's are among them
            told.renewed.add(each.permit_id)
    return passed_over


def _by_id(cursor: AnyCursor) -> _Rows:
    return {row[0]: row[1:] for row in cursor.fetchall()}


def _carried(held: Acquired, rows: _Rows) -> bool:
    """Whether all rows of a grant are its own: the next holder of one may be of this process too."""
    return all(rows.get(row_id, (None,))[0] == held.permit_id for row_id in held.grant.row_ids)


def _row_ids(held: Sequence[Acquired]) -> str:
    return ",".join(str(row_id) for each in held for row_id in each.grant.row_ids)


def _loss(token: int, row: tuple[Any, ...] | None) -> Loss:
    if row is None:
        return Loss(LossReason.EXPIRED, "its row was deleted")
    _permit_id, _asked, revoked_token, revoked_by = row
    if revoked_token == token:
        return Loss(LossReason.REVOKED, f"revoked by {revoked_by or 'an operator'}", revoked_by or "")
    return Loss(LossReason.EXPIRED, "its lease ran out and its slot was taken or purged")
