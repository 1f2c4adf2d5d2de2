"""Processes with a beacon and nothing else."""

from __future__ import annotations

import os
import select
import signal
import sys
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import connections

from django_sqlsem.database import beacons
from django_sqlsem.database.beacons import beacon_for
from django_sqlsem.database.dialects import dialect_for
from django_sqlsem.database.sessions import OwnSession
from tests.support.children import listen, say
from tests.support.processes import Child

T = TypeVar("T")


class Lamp:
    """A session with a beacon, as a keeper has one, lit for a process id of its own."""

    def __init__(self, alias: str, process_id: str = "") -> None:
        self.session = OwnSession(alias)
        self.process_id = process_id or uuid.uuid4().hex
        beacon = beacon_for(connections[alias])
        assert beacon is not None
        self.beacon = beacon
        self.lit = False

    def light(self) -> bool:
        """Take the beacon, or see that it is taken."""
        self.lit = self.run(lambda cursor: self.beacon.light(cursor, self.process_id))
        return self.lit

    def dead(self, *process_ids: str) -> set[str]:
        """Ask on the session that has the beacon."""
        return self.run(lambda cursor: self.ask(cursor, *process_ids))

    def ask(self, cursor: Any, *process_ids: str) -> set[str]:
        """Return who is known to be dead, asked on any session as the library's statements ask."""
        if not self.lit:
            return set()
        dialect = dialect_for(cursor.db)
        if dialect.dead is None:
            directory = beacons.path_of(cursor) + beacons.SUFFIX
            return {each for each in process_ids if beacons.is_free(directory, each)}
        mark = "%s::text" if dialect.notifies else "%s"
        rows = " UNION ALL ".join([f"SELECT {mark} AS id"] * len(process_ids))
        dead = dialect.dead.format(process_id="asked.id")
        own = dialect.dead.format(process_id=mark)
        cursor.execute(
            f"SELECT id FROM ({rows}) asked WHERE {dead} AND NOT {own}",
            [*process_ids, *[self.process_id] * own.count("%s")],
        )
        return {row[0] for row in cursor.fetchall()}

    def run(self, work: Callable[[Any], T]) -> T:
        """Call ``work`` with a cursor of Django's on the session."""

        def on_the_connection(_: Any) -> T:
            with self.session.connection.cursor() as cursor:
                return work(cursor)

        return self.session.run(on_the_connection)

    def close(self) -> None:
        """Put it out."""
        self.lit = False
        self.beacon.put_out()
        self.session.close()

    def __enter__(self) -> Lamp:
        assert self.light()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def burn(alias: str, process_id: str) -> None:
    """Light a beacon, and do what the parent's lines say."""
    lamp = Lamp(alias, process_id)
    os.register_at_fork(after_in_child=lamp.beacon.after_fork)
    say("lit" if lamp.light() else "dark")
    while (line := listen()) != "end":
        if line == "light":
            say("lit" if lamp.light() else "dark")
        elif line == "hammer":  # light it over and over until the next line comes
            say("hammering")
            lit = 0
            while not _has_line():
                assert lamp.light()
                lit += 1
            listen()
            say(f"lit {lit}")
        elif line == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            say(f"forked {child}")
        elif line == "fork and end":
            for leave in (os._exit, lambda code: _exit_as_usual()):
                child = os.fork()
                if child == 0:
                    leave(0)
                _, status = os.waitpid(child, 0)
                assert status == 0, status
            say("forked")
        else:
            raise ValueError(line)
    lamp.close()


def _exit_as_usual() -> None:
    raise SystemExit(0)


def _has_line() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Burning(Child):
    """The parent's side of ``burn``."""

    def __init__(self, alias: str, *, process_id: str = "", env: dict[str, str] | None = None) -> None:
        self.process_id = process_id or uuid.uuid4().hex
        super().__init__("tests.programs.beacon_holders:burn", alias, self.process_id, env=env)

    def ready(self) -> Burning:
        """Wait until it is lit."""
        self.expect("lit", timeout=60)
        return self

    def ask(self, line: str, expected: str) -> str:
        """Send a line and wait for the answer."""
        self.send(line)
        return self.expect(expected)


def swarm(database: str, living: list[str], rounds: int, at_once: int) -> None:
    """Fork processes that create their files, sweep, look and are killed, ``at_once`` of them again and again.

    Each sees for itself that nobody removes its file or takes it for dead, nor those of ``living``.
    """
    beacons.KEEP = 0.0  # type: ignore[misc] - removed as soon as it has been emptied
    running: set[int] = set()
    for number in range(rounds):
        child = os.fork()
        if child == 0:
            _swarm_one(database, living, orderly=number % 4 == 0)
        running.add(child)
        while len(running) >= at_once or (number == rounds - 1 and running):
            child, status = os.wait()
            running.discard(child)
            assert status in (0, signal.SIGKILL), f"process {child} ended with {status}"
    say("done")


def _swarm_one(database: str, living: list[str], *, orderly: bool) -> None:
    code = 1
    try:
        name = uuid.uuid4().hex
        file = beacons.LockFile(database, name)
        for _ in range(20):
            beacons.sweep(file.directory)
            assert file.stands, "its file is gone"
            for each in [name, *living]:
                assert not beacons.is_free(file.directory, each), f"{each} is taken for dead"
        if not orderly:
            os.kill(os.getpid(), signal.SIGKILL)
        file.remove()
        code = 0
    finally:
        os._exit(code)
