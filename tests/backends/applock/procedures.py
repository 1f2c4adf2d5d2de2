"""Programs without Django that call the stored procedures: plain sessions, in this process and in others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from django.db import connections

from django_sqlsem.backends.applock import calls, install
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
#: A stand-in does not write ``nvarchar(max)`` to an output variable, so the slots are read from the row.
_TAKE = "EXEC sqlsem.acquire @name = ?, @slots = ?, @take = ?, @timeout_ms = ?, @answer = 1"
_PROVE = """
SET NOCOUNT ON;
DECLARE @name nvarchar(4000) = ?, @slot int = ?, @rc int, @by nvarchar(300);
EXEC @rc = sqlsem.prove @name = @name, @slot = @slot, @stop_by = @by OUTPUT;
SELECT @rc, @by;
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

    def take(self, name: str, slots: int, take: int, timeout_ms: int = 20_000) -> tuple[int, tuple[int, ...]]:
        """Acquire several slots. Return the return code and the slots."""
        rc, slot, taken, _token, _waited = self.rows(_TAKE, name, slots, take, timeout_ms)[0]
        found = tuple(sorted(int(each) for each in taken.split(",") if each)) if rc >= 0 else ()
        assert rc < 0 or slot in found
        return int(rc), found

    def prove(self, name: str, slot: int) -> tuple[int, str | None]:
        """Return the return code, and who asks to stop."""
        rc, by = self.rows(_PROVE, name, slot)[0]
        return int(rc), by

    @contextlib.contextmanager
    def cancelled_after(self, ms: int) -> Iterator[None]:
        """Cancel what runs in the block so many milliseconds later, as a client does. Expects the driver's error.

        A stand-in reads no cancel while it works, but lets a session say how long a statement may take, and ends it
        as it would for a cancel: no ``CATCH`` runs, and the session's locks stay. Now and then that strikes a lock
        request, which is refused then, and the call goes on.
        """
        if tds.is_stand_in(ALIAS):
            self.do(f"SELECT set_config('statement_timeout', '{ms}', false)")
            timer = None
        else:
            timer = threading.Timer(ms / 1000, self.cancel)
            timer.start()
        began = time.monotonic()
        try:
            yield
        except self.error_class:
            if time.monotonic() - began < 0.9 * ms / 1000:  # another error
                raise
        else:
            assert timer is None, "it ended before it was cancelled"
        finally:
            if timer is not None:
                timer.join()
            else:
                self.do("SELECT set_config('statement_timeout', '0', false)")

    def cancel(self) -> None:
        """Cancel what another thread runs on this session."""
        self.cursor.cancel()


def see_that_they_are_there() -> None:
    """Install them where a test has removed or changed them."""
    connection = connections[ALIAS]
    if install.installed(connection) != install.version():
        install.install(connection)


@contextlib.contextmanager
def changed(*names: str, by: str = "-- as in another version") -> Iterator[None]:
    """Have the package be another version, in which these procedures begin with something else."""
    texts = {
        name: text.replace("\nAS\n", f"\nAS\n{by}\n") if name in names else text for name, text in calls.files().items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "files", lambda: texts)
        install.version.cache_clear()
        try:
            yield
        finally:
            install.version.cache_clear()
    install.version.cache_clear()


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


def take_several(name: str, slots: int, take: int, seconds: float, work: float) -> None:
    """Go in and out for so long with several slots at once, and say ``done <times>``."""
    program = Program()
    warm_up(program)
    counter, times = OutsideCounter(ALIAS, name), 0
    say("ready")
    listen()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rc, taken = program.take(name, slots, take)
        assert rc >= 0, rc
        assert len(set(taken)) == take
        assert max(taken) <= slots
        with contextlib.ExitStack() as stack:
            for _ in taken:
                stack.enter_context(counter.inside())
            time.sleep(work)
        assert program.give(name) == 0
        times += 1
    say(f"done {times}")
