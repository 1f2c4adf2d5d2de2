"""Which names somebody holds or waits for: found by the rows that say so, among any number of idle ones."""

from __future__ import annotations

from django_sqlsem.backends.rows_acts import database_errors
from django_sqlsem.models import SlotRow, WaiterRow


def names_in_use(alias: str, most: int) -> list[str]:
    """Return at most so many names, by one query; of more, whichever the database finds. Raises ``BackendError``."""
    taken = SlotRow.objects.using(alias).filter(expires_us__isnull=False).order_by().values_list("semaphore__name")
    wanted = WaiterRow.objects.using(alias).order_by().values_list("semaphore__name")
    with database_errors(alias):
        return [name for (name,) in taken.union(wanted)[:most]]
