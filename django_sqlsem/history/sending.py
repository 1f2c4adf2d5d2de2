"""A transaction beside what a session is really for: whatever is refused there leaves the session as it was."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final

from django.db import Error as DjangoDatabaseError

from django_sqlsem.cursors import BEGIN, limited
from django_sqlsem.exceptions import BackendError
from django_sqlsem.history import statements
from django_sqlsem.session_settings import is_disconnect, is_timeout_of_sql_server, is_transient, sqlstate

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_sqlsem.cursors import AnyCursor
    from django_sqlsem.sessions import KeeperSession

#: The shortest limit that MySQL knows, and a little more, in seconds.
MYSQL_SECONDS: Final = 1.2

_TIMED_OUT_SQLSTATE: Final = "57014"
_TIMED_OUT_MYSQL: Final = (1969, 3024)


class TooSoonError(Exception):
    """So little time as there is now cannot be kept to on this database."""


def in_transaction(
    session: KeeperSession, body: Callable[[AnyCursor], object], seconds: float, in_line: float
) -> Exception | None:
    """Call ``body`` in a transaction in which no statement takes longer than ``seconds``. Returns an error or ``None``.

    ``in_line``: for how many seconds to stand in line where a database has one writer.
    """

    def apart(cursor: AnyCursor) -> bool:
        statements.limit(cursor, seconds)
        with limited(cursor, seconds) as fresh:
            body(fresh)
        return True

    def beside(cursor: AnyCursor) -> Exception | None:
        # On an error that a session hears of it throws its connection away, and others count on this one.
        connection: Any = cursor.db
        refused = connection.Database.Error
        if statements.is_mysql(connection) and seconds < MYSQL_SECONDS:
            return TooSoonError()
        try:
            _begin(cursor, in_line, refused)
        except refused as error:
            return _kept(error)
        try:
            apart(cursor)
            cursor.execute("COMMIT")
        except refused as error:
            found = _kept(error)
            cursor.execute("ROLLBACK")
            return found
        finally:
            statements.unlimit(cursor)
        return None

    refusals: list[Exception] = []

    def once(cursor: AnyCursor) -> bool | None:
        done = None
        try:
            done = apart(cursor)
        except DjangoDatabaseError as error:
            if not (is_transient(error) or is_timeout_of_sql_server(error)):
                raise  # and the session throws its connection away
            refusals.append(_kept(error))  # of which the session would make its own time-consuming tries
        statements.unlimit(cursor)
        return done

    vendor = session.connection.vendor
    try:
        if vendor == "microsoft" and seconds < 1:
            return TooSoonError()
        if vendor in BEGIN:
            return session.run(beside, again=False)
        session.transaction(once, again=False)
        return refusals[0] if refusals else None
    except Exception as error:  # noqa: BLE001 - a fault of the history's own is no permit's concern either
        return error


def passes(error: Exception) -> bool:
    """Whether an error of ``in_transaction`` is likely to be over soon, so that it is worth to try again."""
    if isinstance(error, BackendError):
        if not isinstance(error.__cause__, Exception):
            return False
        error = error.__cause__
    cause: Any = error.__cause__ or error
    code = cause.args[0] if getattr(cause, "args", ()) else None
    late = sqlstate(cause) == _TIMED_OUT_SQLSTATE or code in _TIMED_OUT_MYSQL
    return late or is_transient(error) or is_timeout_of_sql_server(error) or is_disconnect(error)


def _kept(error: Any) -> Exception:
    """Return an error that has not cost the connection; raise any other."""
    if is_disconnect(error):
        raise error
    error.__traceback__ = None  # it is on a cycle with the frames that it came through
    found: Exception = error
    return found


def _begin(cursor: AnyCursor, in_line: float, refused: Any) -> None:
    give_up = time.monotonic() + in_line
    while True:
        try:
            cursor.execute(BEGIN[cursor.db.vendor])
            return
        except refused as error:
            if not is_transient(error) or time.monotonic() > give_up:
                raise
        time.sleep(random.uniform(0.001, 0.003))  # noqa: S311 - no two in step
