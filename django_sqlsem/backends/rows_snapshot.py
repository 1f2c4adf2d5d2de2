"""What one name's rows say, read on a connection of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django_sqlsem.backends.dialects import Dialect
from django_sqlsem.backends.row_clock import RowClock
from django_sqlsem.backends.rows_wishes import asking
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from django_sqlsem.snapshots import SemaphoreSnapshot

if TYPE_CHECKING:
    from django.db.models import Model

    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.naming import Resource
    from django_sqlsem.sessions import Session

_WHO: Final = ("host", "pid", "thread", "label", "user", "boot_id")
_SEMAPHORE: Final = (
    "name", "kind", "declared_slots", "declared_us", "operator_slots", "paused", "other_slots", "other_us", "tokens",
)  # fmt: skip
_SLOT: Final = ("slot", "token", "acquired_us", "expires_us", "lease_us", "suspect_us", "mode", *_WHO)
_ASKED: Final = ("stop_token", "stop_by")
_WAITER: Final = ("queued_us", "waiting", "take", "mode", *_WHO)
_USUAL: Final = (
    "SELECT (SELECT AVG(held_us) FROM sqlsem_slot WHERE semaphore_key = %(key)s AND held_us > 0),"
    " (SELECT COUNT(*) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND {live} AND away = %(yes)s),"
    " (SELECT SUM(take) FROM sqlsem_waiter WHERE semaphore_key = %(key)s AND NOT ({live}) AND away = %(yes)s)"
)


def read_snapshot(session: Session, dialect: Dialect, resource: Resource) -> SemaphoreSnapshot | None:
    """Return the snapshot of one name, or ``None`` if it has no rows. Raises ``BackendError``."""

    def read(cursor: AnyCursor) -> SemaphoreSnapshot | None:
        clock = RowClock(dialect.now(cursor), dialect.boot_id)
        found = _select(cursor, dialect, SemaphoreRow, _SEMAPHORE, "name_key = %(key)s", resource)
        if not found:
            return None
        semaphore = SemaphoreRow(**found[0])
        dialect.execute(cursor, _USUAL.replace("{live}", dialect.live_sql()), {"key": resource.key, "yes": True})
        usual, away, overdue = cursor.fetchone()
        taken = "semaphore_key = %(key)s AND expires_us IS NOT NULL ORDER BY slot"
        slots = asking(
            cursor,
            lambda asks: _select(cursor, dialect, SlotRow, (*_SLOT, *(_ASKED if asks else ())), taken, resource),
        )
        waiters = _select(
            cursor,
            dialect,
            WaiterRow,
            _WAITER,
            f"semaphore_key = %(key)s AND {dialect.waits_sql()} ORDER BY queued_us, id",
            resource,
        )
        return clock.semaphore(
            semaphore,
            tuple(clock.holder(resource.name, SlotRow(**values)) for values in slots),
            tuple(clock.waiter(resource.name, WaiterRow(**values)) for values in waiters),
            usual_hold=float(usual) / 1e6 if usual else None,
            away=int(away),
            overdue=int(overdue or 0),
        )

    return session.run(read)


def _select(
    cursor: AnyCursor,
    dialect: Dialect,
    model: type[Model],
    names: tuple[str, ...],
    where: str,
    resource: Resource,
) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {field.name: field for field in model._meta.concrete_fields}
    columns = ", ".join(fields[name].column for name in names)
    dialect.execute(cursor, f"SELECT {columns} FROM {model._meta.db_table} WHERE {where}", {"key": resource.key})
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
