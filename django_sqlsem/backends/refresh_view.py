"""What operators see of refreshed values, read on the alias's ordinary connection."""

from __future__ import annotations

from django_sqlsem.backends.row_clock import RowClock
from django_sqlsem.backends.rows_acts import database_errors
from django_sqlsem.models import RefreshRow
from django_sqlsem.snapshots import RefreshSnapshot


def refreshes(alias: str, prefix: str = "") -> list[RefreshSnapshot]:
    """Return the values whose names begin with ``prefix``, by name. Raises ``BackendError``."""
    with database_errors(alias):
        clock = RowClock.of(alias)
        rows = RefreshRow._default_manager.using(alias).filter(name__startswith=prefix).order_by("name")
        found = [snapshot_of(clock, row) for row in rows]
    # Some databases fold case here.
    return sorted((each for each in found if each.name.startswith(prefix)), key=lambda each: each.name)


def snapshot_of(clock: RowClock, row: RefreshRow) -> RefreshSnapshot:
    """Return what a row says at the clock's instant."""
    built = row.built_us is not None
    age = max(0.0, clock.age(row.built_us, row.boot_id)) if built else None
    period = row.period_us / 1e6
    # One from before the host's boot is due, as is one that was said to be out of date.
    counts = age is not None and row.boot_id == clock.boot_id and row.built_for == row.invalidations
    return RefreshSnapshot(
        name=row.name,
        period=period,
        host=row.host,
        pid=row.pid,
        thread=row.thread,
        label=row.label,
        user=row.user,
        built_at=None if age is None else clock.at(age),
        age=age,
        took=row.took_us / 1e6 if built else None,
        due_in=max(0.0, period - age) if age is not None and counts else 0.0,
        failed=None if row.failed_us is None else max(0.0, (clock.now - row.failed_us) / 1e6),
    )
