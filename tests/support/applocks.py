"""What application locks do otherwise than rows: which tests leave them out, and why.

A test that is about rows alone is marked ``@pytest.mark.rows_only(why)``, where ``why`` is one of ``ROWS_ONLY``. What
holds there instead is in ``tests.backends.applock``, or in the same test, behind ``free_at_once`` or ``are_at``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
from django.db import connections

from django_sqlsem.backends.applock.pool import LockPool
from django_sqlsem.backends.applock.sessions import LockSession
from tests.support import citus, tds
from tests.support.threads import wait_until

#: Why a test does not apply to application locks, by the word that its marker gives.
ROWS_ONLY: Final = {
    "lease": "application locks have no lease: nothing expires, and a stopped process keeps its slots",
    "beacons": "application locks need no beacons: the server frees what a dead process held",
    "row statements": "application locks are taken by stored procedures, not by the statements on rows",
    "row queue": "the line for application locks is the server's: a process queues anew for each of its grants",
    "row grants": "application locks are handed on by the server: no holder grants anything to a waiter",
    "gathering": "who is first in line for several application locks has those that are free, while its call waits",
    "ranks": "whoever comes back to application locks queues anew: a place in the server's queue needs a session",
    "slot rows": "application locks need no row of a slot before its first grant, and none is closed",
    "one of a name": "a session keeps one permit of a name, as its locks are re-entrant: many need as many sessions",
    "key rows": "application locks of a transaction have no rows",
    "several hosts": "the sessions of application locks are opened by a pool of their own, which knows one host",
    "sessions": "application locks end with the session that has them, and no other session keeps them",
}


def are_at(alias: str) -> bool:
    """Return whether locks on an alias are application locks."""
    return connections[alias].vendor == "microsoft"


def parameter(request: Any) -> str:
    """Return the alias that a fixture is asked for. Skips a test of rows alone on application locks, and says why."""
    alias: str = request.param
    marker = request.node.get_closest_marker("rows_only")
    if marker is not None and are_at(alias):
        (why,) = marker.args
        pytest.skip(f"rows only: {ROWS_ONLY[why]}")
    if alias == citus.ALIAS and (reason := citus.left_out(request.node)):
        pytest.skip(f"not on Citus: {reason}")
    return alias


def note_statements(note: Callable[[str], object]) -> None:
    """Call ``note`` with the text of every call that this process sends on lock sessions, from now on."""
    real = LockSession._execute

    def execute(session: LockSession, text: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        note(text)
        return real(session, text, *args, **kwargs)

    LockSession._execute = execute  # type: ignore[method-assign]


def is_connected(session: Any) -> bool:
    """Return whether a keeper's session, or one of its lock sessions, is connected."""
    return bool(session.sessions()) if isinstance(session, LockPool) else bool(session.is_open)


#: The sessions that play holders, by alias and resource.
_players: dict[tuple[str, str], Any] = {}
_GET: Final = (
    "SET NOCOUNT ON; DECLARE @rc int; EXEC @rc = sys.sp_getapplock @Resource = ?, @LockMode = ?,"
    " @LockOwner = 'Session', @LockTimeout = 0, @DbPrincipal = 'public'; SELECT @rc"
)
_WHO: Final = (
    "SELECT session_id, DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) FROM sys.dm_exec_sessions"
    " WHERE session_id = @@SPID"
)


def lock(alias: str, name: str, slot: int, *, held: bool) -> dict[str, int]:
    """Have a session that plays a holder have a slot's lock, or have it no longer. Returns what its row says of it."""
    let_go_of(alias, name, slot)
    if not held:
        return {}
    base = tds.lock_base(name)
    player = _players[alias, f"{slot}-{base}"] = tds.raw_connection(alias)
    cursor = player.cursor()
    for resource, mode in ((base, "IntentExclusive"), (f"{slot}-{base}", "Exclusive")):
        cursor.execute(_GET, (resource, mode))
        assert tds.rows(cursor)[0][0] >= 0, f"{resource!r} is taken"
    # A stand-in lists a session a moment after its login.
    ((session_id, session_us),) = wait_until(lambda: tds.rows(cursor.execute(_WHO)))
    return {"session_id": int(session_id), "session_us": int(session_us)}


def let_go_of(alias: str, name: str, slot: int) -> None:
    """End the session that plays the holder of a slot, if there is one."""
    if (player := _players.pop((alias, f"{slot}-{tds.lock_base(name)}"), None)) is not None:
        _end(player)
        resource = f"{slot}-{tds.lock_base(name)}"
        wait_until(lambda: tds.locked(alias, [resource]) == [False], what=f"{resource!r} is free")


def let_go() -> None:
    """End the sessions that play holders."""
    while _players:
        _end(_players.popitem()[1])


def _end(player: Any) -> None:
    with contextlib.suppress(Exception):  # it may have been revoked
        player.close()
