"""Programs without Django that call the stored procedures: plain sessions, in this process and in others."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from django_sqlsem.backends.applock.tsql import procedures
from tests.backends.applock.counting_semaphore import Caller
from tests.backends.applock.plain import ALIAS, Session
from tests.support import tds
from tests.support.children import listen, say
from tests.support.databases import OutsideCounter

_ACQUIRE = """
SET NOCOUNT ON;
DECLARE @name nvarchar(4000) = ?, @slots int = NULLIF(?, -99), @timeout int = NULLIF(?, -99), @label nvarchar(200) = ?,
    @rc int, @slot int, @token bigint, @waited int;
EXEC @rc = sqlsem.acquire @name = @name, @slots = @slots, @timeout_ms = @timeout, @label = @label, @slot = @slot OUTPUT,
    @token = @token OUTPUT, @waited_ms = @waited OUTPUT;
SELECT @rc, @slot, @token, @waited;
"""
_RELEASE = """
SET NOCOUNT ON;
DECLARE @name nvarchar(4000) = ?, @slot int = NULLIF(?, -99), @rc int;
EXEC @rc = sqlsem.release @name = @name, @slot = @slot;
SELECT @rc;
"""
_NULL = -99


class Program(Session):
    """A plain session that calls the procedures."""

    def acquire(
        self, name: str, slots: int | None = None, timeout_ms: int | None = 20_000, label: str = "job"
    ) -> tuple[int, int | None, int | None, int]:
        """Return the return code, the slot, the token and the milliseconds waited."""
        given = [_NULL if each is None else each for each in (slots, timeout_ms)]
        return self.rows(_ACQUIRE, name, *given, label)[0]  # type: ignore[return-value]

    def give(self, name: str, slot: int | None = None) -> int:
        """Release, and return the return code."""
        return int(self.value(_RELEASE, name, _NULL if slot is None else slot))


def install(monkeypatch: Any, names: list[str]) -> None:
    """See that they are there, as the command installs them; a stand-in, which hashes otherwise, looks digests up."""
    session = Session()
    try:
        if tds.is_stand_in(ALIAS):
            monkeypatch.setattr(procedures, "_hash", _looked_up)
        if session.value("SELECT OBJECT_ID(N'sqlsem.status')") is not None:
            return
        if tds.is_stand_in(ALIAS):
            session.do(
                "IF OBJECT_ID(N'dbo.testapp_digest') IS NULL CREATE TABLE dbo.testapp_digest ("
                "name nvarchar(200) COLLATE Latin1_General_100_BIN2, hex varchar(1600),"
                " utf8 varchar(64), utf16 varchar(64))"
            )
            session.do("DELETE FROM dbo.testapp_digest")
            for name in names:
                utf8, utf16 = name.encode(), name.encode("utf-16-le")
                digests = [hashlib.sha256(each).hexdigest() for each in (utf8, utf16)]
                session.do("INSERT INTO dbo.testapp_digest VALUES (?, ?, ?, ?)", name, utf8.hex().upper(), *digests)
        for batch in procedures.procedures():
            session.do(batch)
    finally:
        session.close()


def _looked_up(expression: str) -> str:
    what, where = {
        "@name": ("utf16", "d.name = @name"),
        "m.name": ("utf16", "d.name = m.name"),
        "CONVERT(varbinary(800), @hex, 2)": ("utf8", "d.hex = @hex"),
        "CAST(@name AS varchar(400))": ("utf8", "d.name = @name"),
    }[expression]
    return f"(SELECT d.{what} FROM dbo.testapp_digest AS d WHERE {where})"


# What child processes run.


def warm_up(program: Program) -> None:
    """Call them once: the first call of a session is slow."""
    assert program.acquire("warm", 8)[0] >= 0
    program.give("warm")


def hold(name: str, slots: int) -> None:
    """Acquire, say ``held <slot> <session>``, and give back after a line."""
    program = Program()
    rc, slot, _token, _waited = program.acquire(name, slots)
    assert rc >= 0, rc
    say(f"held {slot} {program.spid}")
    listen()
    program.give(name)
    say("released")


def queue_up(name: str) -> None:
    """After a line, wait for a semaphore of one slot, say ``held``, and give it back after a line."""
    program = Program()
    warm_up(program)
    say(f"ready {program.spid}")
    listen()
    rc = program.acquire(name, 1)[0]
    say(f"held {rc}")
    listen()
    program.give(name)


def call_procedures(name: str, slots: int, seconds: float, work: float) -> None:
    """Go in and out for so long, and say ``done <times>``."""
    program = Program()
    warm_up(program)
    counter, times = OutsideCounter(ALIAS, name), 0
    say("ready")
    listen()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rc = program.acquire(name, slots)[0]
        assert rc >= 0, rc
        with counter.inside():
            time.sleep(work)
        assert program.give(name) == 0
        times += 1
    say(f"done {times}")


def call_the_old_ones(name: str, slots: int, seconds: float, work: float) -> None:
    """The same with the procedures that every DBA knows."""
    caller = Caller(ALIAS)
    counter, times = OutsideCounter(ALIAS, name), 0
    say("ready")
    listen()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slot = caller.acquire(name, slots)
        with counter.inside():
            time.sleep(work)
        caller.release(name, slot)
        times += 1
    say(f"done {times}")


def use_django(name: str, slots: int, seconds: float, work: float) -> None:
    """The same from Django."""
    from django_sqlsem import semaphore

    counter, times = OutsideCounter(ALIAS, name), 0
    mine = semaphore(name, slots=slots, using=ALIAS)
    with semaphore("warm", slots=8, using=ALIAS):
        assert counter.current >= 0
    say("ready")
    listen()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with mine, counter.inside():
            time.sleep(work)
        times += 1
    say(f"done {times}")
