"""Tables that know nothing of wishes yet: code that is newer than them keeps its permits, and is asked nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import Error as DjangoDatabaseError

from django_sqlsem.clocks import boot_now
from django_sqlsem.session_settings import is_missing_column

if TYPE_CHECKING:
    from django_sqlsem.cursors import AnyCursor

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
