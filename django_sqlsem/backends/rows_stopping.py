"""An operator's wish that a holder stop, in the rows: written beside the permit's token, for that grant alone.

The holder's next renewal brings it along. A process that a bell or NOTIFY reaches is woken, and renews at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, Q

from django_sqlsem import bells
from django_sqlsem.backends.dialects import dialect_for

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_sqlsem.models import SlotRow

logger = logging.getLogger("django_sqlsem")


def ask(held: QuerySet[SlotRow], companions: Callable[[SlotRow], QuerySet[SlotRow]], by: str) -> SlotRow | None:
    """Write the wish into a slot (``held``), and into whatever else its holder has of the name, in this transaction.

    ``companions``: the other taken slots that belong to one by its mode. Whoever asked first stays noted. Returns the
    slot as it is now, or ``None`` if it is not held any more.
    """
    row = held.first()
    if row is None:
        return None
    wish = {"stop_token": F("token"), "stop_by": by}
    if row.stop_token != row.token:
        # Its holder may have left since it was read.
        if not held.update(**wish):
            return None
        row.stop_token, row.stop_by = row.token, by
    alias, others = held.db, _others(row, held) | companions(row)
    others.exclude(stop_token=F("token")).update(**wish)
    # Its processes as they are: what was handed over may have changed hands inside one.
    for channel, permit_id in {(row.channel, row.permit_id), *others.values_list("channel", "permit_id")}:
        transaction.on_commit(functools.partial(_wake, alias, channel, permit_id or ""), using=alias)
    return row


def _others(row: SlotRow, held: QuerySet[SlotRow]) -> QuerySet[SlotRow]:
    """The other slots of the same permit."""
    rows = type(row)._default_manager.using(held.db)
    same = Q(semaphore=row.semaphore_id, permit_id=row.permit_id, expires_us__isnull=False)
    return rows.filter(same).exclude(pk=row.pk)


def _wake(alias: str, channel: str, permit_id: str) -> None:
    """Have a holder's process renew its permit now; if it does not hear, its next renewal is soon enough."""
    if bells.ring(channel, permit_id) or not channel:
        return
    connection = connections[alias]
    if not dialect_for(connection).notifies or connection.in_atomic_block:
        return
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", (channel, permit_id))
    except DatabaseError as error:
        logger.debug("A holder could not be woken: %s", error)
