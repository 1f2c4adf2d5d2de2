"""Renewals of the rows backend: one statement for all permits, and what became of those it did not extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends import rows_sql as sql
from django_sqlsem.backends.base import Held, Renewal
from django_sqlsem.backends.dialects import Dialect
from django_sqlsem.snapshots import Loss, LossReason

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.sessions import Session

#: How many grants one statement names at the most; every database takes lists of this length.
RENEW_AT_ONCE: Final = 500


def renew(session: Session, dialect: Dialect, held: Sequence[Held]) -> Renewal:
    """Extend all these grants, some hundred to a statement."""
    renewed: set[str] = set()
    lost: dict[str, Loss] = {}
    for start in range(0, len(held), RENEW_AT_ONCE):
        _renew_some(session, dialect, held[start : start + RENEW_AT_ONCE], renewed, lost)
    return Renewal(frozenset(renewed), lost)


def _renew_some(
    session: Session, dialect: Dialect, held: Sequence[Held], renewed: set[str], lost: dict[str, Loss]
) -> None:
    row_ids = _row_ids(held)
    permit_ids = ",".join(f"'{each.permit_id}'" for each in held)  # our own hex digits
    wanted = sum(len(each.grant.row_ids) for each in held)
    beacon = {"beacon": held[0].presence.beacon}

    def extend(cursor: AnyCursor) -> set[int] | None:
        if dialect.arrays:
            parameters = beacon | {
                "row_ids": [row_id for each in held for row_id in each.grant.row_ids],
                "permit_ids": [each.permit_id for each in held],
            }
            dialect.execute(cursor, sql.renew_arrays(dialect), parameters)
        else:
            dialect.execute(cursor, sql.renew(dialect, row_ids, permit_ids), beacon)
        if dialect.returning:
            return {row[0] for row in cursor.fetchall()}
        return None if cursor.rowcount < wanted else {row_id for each in held for row_id in each.grant.row_ids}

    def extend_unlocked(cursor: AnyCursor) -> list[set[int] | None]:
        if not (dialect.for_update and session.connection.features.has_select_for_update_skip_locked):
            return [extend(cursor)]
        # One row that someone keeps locked must not cost the other permits their leases.
        dialect.execute(cursor, sql.UNLOCKED % (row_ids, permit_ids), {})
        found = {row[0] for row in cursor.fetchall()}
        if found:
            dialect.execute(cursor, sql.renew(dialect, ",".join(map(str, found)), permit_ids), beacon)
        return [found]

    if dialect.returning:
        extended = session.run(extend)
    else:
        [extended] = session.transaction(extend_unlocked) or [None]
    if extended is not None:
        renewed.update(each.permit_id for each in held if extended.issuperset(each.grant.row_ids))
    doubtful = [each for each in held if each.permit_id not in renewed]
    if doubtful:
        _ask_fate(session, dialect, doubtful, extended is not None, renewed, lost)


def fate(session: Session, dialect: Dialect, held: Held) -> Loss | None:
    """Return how a grant was lost, or ``None`` if its rows still carry it. Changes nothing."""
    lost: dict[str, Loss] = {}
    _ask_fate(session, dialect, [held], True, set(), lost)
    return lost.get(held.permit_id)


def _ask_fate(
    session: Session,
    dialect: Dialect,
    held: Sequence[Held],
    told: bool,
    renewed: set[str],
    lost: dict[str, Loss],
) -> None:
    """Find out what became of grants that were not extended, or may not have been (``told`` is false)."""

    def read(cursor: AnyCursor) -> dict[int, tuple[Any, ...]]:
        dialect.execute(cursor, sql.FATE % _row_ids(held), {})
        return {row[0]: row[1:] for row in cursor.fetchall()}

    rows = session.run(read)
    for each in held:
        losses = [
            _loss(token, rows.get(row_id))
            for row_id, token in zip(each.grant.row_ids, each.grant.tokens, strict=True)
            if rows.get(row_id, (None,))[0] != each.permit_id
        ]
        if losses:
            lost[each.permit_id] = losses[0]
        elif not told:  # the statement only told how many rows it extended: this one's are among them
            renewed.add(each.permit_id)


def _row_ids(held: Sequence[Held]) -> str:
    return ",".join(str(row_id) for each in held for row_id in each.grant.row_ids)


def _loss(token: int, row: tuple[Any, ...] | None) -> Loss:
    if row is None:
        return Loss(LossReason.EXPIRED, "its row was deleted")
    _permit_id, revoked_token, revoked_by = row
    if revoked_token == token:
        return Loss(LossReason.REVOKED, f"revoked by {revoked_by or 'an operator'}", revoked_by or "")
    return Loss(LossReason.EXPIRED, "its lease ran out and its slot was taken or purged")
