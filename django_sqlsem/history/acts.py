"""What operators do, written at once on their own connection: of an act nothing may be lost on the way."""

from __future__ import annotations

import logging
from typing import Final

from django.db import Error as DatabaseError
from django.db import connections, transaction

from django_sqlsem.backends.base import OverAct
from django_sqlsem.conf import config
from django_sqlsem.core.identity import MAX_USER_LENGTH, printable
from django_sqlsem.core.names import key_of
from django_sqlsem.database.cursors import AnyCursor
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OwnSession, used_by_orm
from django_sqlsem.history.events import (
    DRAINED,
    PAUSED,
    PURGED,
    RESIZED,
    RESUMED,
    REVOKED,
    STOP_ASKED,
    parse_slots,
    several,
)
from django_sqlsem.models import EventRow
from django_sqlsem.snapshots import HolderSnapshot, who

logger = logging.getLogger("django_sqlsem")

#: By the words that ``control`` has for them.
_KINDS: Final = {
    "stop": STOP_ASKED,
    "revoke": REVOKED,
    "purge": PURGED,
    "set slots": RESIZED,
    "pause": PAUSED,
    "resume": RESUMED,
    "drain": DRAINED,
}
#: What the end of the time of an act amounts to, and what is said of it.
_OVER: Final = {
    "pause": (RESUMED, "its time is over"),
    "slots": (RESIZED, "as declared by the code: its time is over"),
}
#: Of these the holder's time ends.
_ENDS: Final = (REVOKED, PURGED)


def record(alias: str, action: str, name: str, by: str, detail: str, holder: HolderSnapshot | None = None) -> None:
    """Write that an operator has acted on a name, and on which holder. The act stands, whatever becomes of this."""
    settings = config(alias)
    what = _KINDS.get(action)
    if what is None or not (settings.history and settings.history_acts):
        return
    connection = connections[alias]
    dialect = dialect_for(connection)
    whose = {} if holder is None else {"slot": holder.slot, "token": holder.token, **who(holder)}
    row = EventRow(key=key_of(name), name=name, what=what, by=printable(by, MAX_USER_LENGTH), detail=detail, **whose)
    if holder is not None:
        row.held_us = round(holder.age * 1e6) if what in _ENDS and holder.recorded else None
        told = detail if parse_slots(detail.removeprefix("slots ")) == () else f"({detail})"  # else it passes for slots
        row.detail = ": ".join(filter(None, (several(holder.numbers), told)))
    row.detail = printable(row.detail, 500)
    try:
        # A savepoint, if the operator's request is a transaction: it must not fail with this.
        with transaction.atomic(using=alias):
            with connection.cursor() as cursor:
                row.at_us = dialect.token_clock(dialect.now(cursor))
            row.until_us = row.at_us + round(settings.history_acts * 1e6)
            row.save(using=alias, force_insert=True)
    except DatabaseError as error:
        logger.warning("That %s acted on %r is missing in the history: %s", by or "somebody", name, error)


def record_over(session: OwnSession, act: OverAct) -> None:
    """Write that the time of an act is over, at the instant when it was. Raises ``BackendError``."""
    alias = session.connection.alias
    settings = config(alias)
    if not (settings.history and settings.history_acts):
        return
    what, detail = _OVER[act.what]
    row = EventRow(key=key_of(act.name), name=act.name, what=what, detail=detail, at_us=act.until_us)
    row.until_us = row.at_us + round(settings.history_acts * 1e6)

    def write(cursor: AnyCursor) -> None:
        with used_by_orm(cursor.db):
            row.save(using=alias, force_insert=True)

    session.run(write)
