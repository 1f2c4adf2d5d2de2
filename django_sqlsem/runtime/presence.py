"""How a process is reached while it waits, and shows that it lives: NOTIFY or a bell, and its beacon."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import Any, Final

from django.db import Error as DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_sqlsem.backends.base import LAPSE_US, Grant, Granted, Presence
from django_sqlsem.conf import config
from django_sqlsem.core.identity import process_id
from django_sqlsem.database import sockets
from django_sqlsem.database.beacons import Beacon, SessionBeacon, beacon_for
from django_sqlsem.database.bells import Bell, near
from django_sqlsem.database.dialects import dialect_for

logger = logging.getLogger("django_sqlsem")

_LAPSE: Final = LAPSE_US / 1e6
_said: set[str] = set()


class Reach:
    """One keeper's ears and its beacon. Its methods run on the keeper's thread, but for ``opened``."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.presence = Presence()
        self.beacon: Beacon | None = None
        #: Whether ``presence`` has been found out: a moment after the first connection is open, on the opener's thread.
        self.known = False
        #: Whether a connection has been opened since this was cleared.
        self.reopened = False
        self.ended = False
        self._bell: Bell | None = None
        self._listening: Any = None
        self._notes: list[str] = []

    def opened(self, connection: BaseDatabaseWrapper) -> None:
        """Listen on a new connection of the keeper's, and light the beacon. Raises Django's database errors."""
        self._listening, self.ended = None, False
        self.reopened = True
        if self._bell is None:
            self._bell = Bell(process_id())
        channel = self._bell.channel
        bells = reachable_from = f"{near()}%" if channel else ""
        if dialect_for(connection).notifies:
            if getattr(connection, "sqlsem_pooled", False):
                self._say_pooled()
            else:
                channel, reachable_from = channel or f"sqlsem_{process_id()}", "%"
                self._listen(connection, channel)
        lit = False
        if config(self.alias).beacons and not getattr(connection, "sqlsem_pooled", False):
            self.beacon = self.beacon or beacon_for(connection)
            if self.beacon is not None:
                with connection.cursor() as cursor:
                    lit = self.beacon.light(cursor, process_id())
        self.presence = Presence(channel, reachable_from, bells, lit)
        self.known = True

    def _listen(self, connection: BaseDatabaseWrapper, channel: str) -> None:
        raw: Any = connection.connection
        if hasattr(raw, "pgconn"):
            raw.add_notify_handler(lambda note: self._notes.append(note.payload))
        else:
            raw.notifies = _Psycopg2Notes(self._notes)
        with connection.cursor() as cursor:
            cursor.execute(f'LISTEN "{channel}"')
        self._listening = raw

    def _say_pooled(self) -> None:
        if self.alias not in _said:
            _said.add(self.alias)
            logger.info(
                "A pooler in transaction mode stands before %r: the server cannot wake waiters, so they look for slots "
                "at intervals if a holder is on another host, and a killed process's slots come back with its lease.",
                self.alias,
            )

    def descriptors(self, connection: BaseDatabaseWrapper | None) -> list[int]:
        """Return what becomes readable when there is something to hear, or when the session has ended."""
        found = [] if self._bell is None else [self._bell.fileno()]
        if connection is not None and connection.connection is not None:
            found += sockets.descriptors(connection.connection)
        return [each for each in found if each is not None and each >= 0]

    def heard(self) -> list[Granted | str]:
        """Return what was granted since the last call: a grant, or a permit id about which to ask the database.

        Sets ``ended`` if the session has ended.
        """
        if self._listening is not None:
            try:
                self._notes += _arrived(self._listening)
            except Exception as error:  # noqa: BLE001 - of the driver: the session has ended
                logger.debug("The keeper's session of %r has ended: %s", self.alias, error)
                self._listening = None
                self.ended = True
        notes = self._notes[:]
        del self._notes[: len(notes)]
        heard: list[Granted | str] = []
        _read_into(heard, notes)
        if self._bell is not None:
            _read_into(heard, self._bell.heard())
        return heard

    @property
    def listens(self) -> bool:
        """Whether the server itself wakes this process."""
        return self._listening is not None

    @property
    def tied(self) -> bool:
        """Whether the beacon goes out with the session."""
        return isinstance(self.beacon, SessionBeacon)

    def darken(self) -> None:
        """The beacon is out: what is claimed now must not say that there is one."""
        self.presence = dataclasses.replace(self.presence, beacon=False)

    def quiet(self) -> bool:
        """Whether nothing has been heard that was not told yet."""
        return not self._notes

    def close(self, *, left: bool = False) -> None:
        """Be reachable no more; ``left``: see ``Beacon.put_out``."""
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self.beacon is not None:
            with contextlib.suppress(OSError, DatabaseError):
                self.beacon.put_out(left=left)
            self.beacon = None
        self._listening = None
        self.presence, self.known = Presence(), False

    def after_fork(self) -> None:
        """In a forked child: let go of what is the parent's, without ending it."""
        if self._bell is not None:
            self._bell.close()
        if self.beacon is not None:
            self.beacon.after_fork()


class _Psycopg2Notes:
    """Where psycopg2 leaves the server's words as they come in."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def append(self, note: Any) -> None:
        """Keep what was said."""
        self._notes.append(note.payload)


def _arrived(raw: Any) -> list[str]:
    """Read what has come in without a statement, and return it; psycopg2 puts it where it is told to."""
    if not hasattr(raw, "pgconn"):
        raw.poll()
        return []
    raw.pgconn.consume_input()
    return [note.extra.decode() for note in iter(raw.pgconn.notifies, None)]


def _read_into(heard: list[Granted | str], notes: list[str]) -> None:
    for note in notes:
        read = _read(note)
        if read is not None:
            heard.append(read)


def _read(note: str) -> Granted | str | None:
    """Return what a note says; nothing if it is not one of ours, since anybody on the host may ring."""
    permit_id, *numbers = note.split() or [""]
    if not numbers:
        return permit_id
    try:
        rows, slots, tokens = (tuple(map(int, numbers[each::3])) for each in range(3))
    except ValueError:
        return None
    return Granted(permit_id, Grant(slots, tokens, rows), _LAPSE) if len(rows) == len(tokens) else None
