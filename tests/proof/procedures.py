"""The stored procedures on SQL Server, statement by statement: which client goes next, and what goes wrong, is chosen.

Each procedure gets a stop before every statement that others can see, or that sees others: their locks, or the rows.
A client that has stopped waits for a lock that the scheduler has. What else it does is what the server does with the
text that ships, but for three things. The clock stands still, so that a schedule leads to the same state each time;
what was waited out is counted by the procedures themselves. A wait for a lock is a stop of its own: who waited first
gets the lock in the very step that frees it, as the server does it, and that a wait has taken too long is a choice.
And a transaction is one step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import connections

from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock.backend import ApplockBackend
from django_sqlsem.backends.applock.line import Line
from django_sqlsem.backends.base import Acquired, Place, Request
from django_sqlsem.core.identity import HolderIdentity
from django_sqlsem.core.modes import WHOLE
from django_sqlsem.core.names import resource_for
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.exceptions import BackendError
from tests.proof.clients import CRASH, GO
from tests.proof.explore import BrokenError, Choice, Findings, Search, hold
from tests.support import tds
from tests.support.threads import wait_until

NAME: Final = "proof"
RESOURCE: Final = resource_for(NAME, "semaphore")
_KEY: Final = RESOURCE.key[:20]
MOST_SLOTS: Final = 3
BASE, GATE = lock_names(NAME).base, f"sqlsem:g:{_KEY}"
#: The locks of the name, as clients tell which of them they have.
RESOURCES: Final = (
    BASE,
    *(f"{slot}-{BASE}" for slot in range(1, MOST_SLOTS + 1)),
    GATE,
    *(f"{GATE}:{number}" for number in range(1, MOST_SLOTS)),
    f"sqlsem:d:{_KEY}",
    f"sqlsem:f:{_KEY}",
)
#: What gets stops.
STEPPED: Final = (
    "internal_acquire_1",
    "internal_behind_1",
    "internal_declare_1",
    "internal_gone_1",
    "internal_prove_1",
    "internal_release_1",
    "internal_try_1",
)
_OTHERS: Final = re.compile(r"APPLOCK_TEST|dbo\.sqlsem_")
#: What a statement depends on, if it is ours alone.
_CONDITION: Final = re.compile(r"\s*IF (.*?)\s*\b(?:EXEC|UPDATE|SELECT)\b", re.DOTALL)
_SHARED: Final = re.compile(_OTHERS.pattern + r"|sp_getapplock|sp_releaseapplock|EXEC sqlsem\.")
#: A line after which a statement begins.
_ENDS: Final = re.compile(r"(;|\bBEGIN|\bBEGIN TRY|\bBEGIN CATCH|^AS)\s*(--.*)?$")
_NOW: Final = "CAST('2096-10-02T07:06:40' AS datetime2(3))"
NOW_US: Final = 4_000_000_000_000_000
#: Parameters that are the same throughout a call, or too long.
_CONSTANT: Final = ("base", "key", "kind", "permit", "thread", "label", "user", "session", "held", "answer")
#: A wait of this many milliseconds, or more, is endless.
ENDLESS: Final = 10_000_000
_HELPERS: Final = {
    # What a client tells when it stops, by its session's number.
    "proof_tell": f"""
CREATE PROCEDURE sqlsem.proof_tell @line nvarchar(60), @locals nvarchar(4000), @wants nvarchar(300)
AS
SET NOCOUNT ON;
BEGIN TRANSACTION;
UPDATE dbo.proof_client SET line = @line, locals = @locals, wants = @wants, modes = CONCAT(
    {", N'|', ".join(f"APPLOCK_MODE(N'public', N'{each}', N'Session')" for each in RESOURCES)})
WHERE session_id = @@SPID;
COMMIT TRANSACTION;
""",
    "proof_drop": """
CREATE PROCEDURE sqlsem.proof_drop @resource nvarchar(255)
AS
SET NOCOUNT ON;
DECLARE @rc int;
IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
    EXEC @rc = sys.sp_releaseapplock @resource, 'Session', 'public';
""",
    # A client runs while it has one of two locks of its own, 'proof:runs:'. It stops by taking the other one, giving
    # the first one back, and asking for one that the scheduler has.
    "proof_stop": """
CREATE PROCEDURE sqlsem.proof_stop @line nvarchar(60), @locals nvarchar(4000), @wants nvarchar(300)
AS
SET NOCOUNT ON;
IF APPLOCK_MODE(N'public', N'proof:client', N'Session') = N'NoLock' RETURN 0;
DECLARE @turn int = 0, @rc int, @runs nvarchar(60), @next nvarchar(60), @go nvarchar(60);
IF APPLOCK_MODE(N'public', CONCAT(N'proof:runs:0:', @@SPID), N'Session') = N'NoLock' SET @turn = 1;
SELECT @runs = CONCAT(N'proof:runs:', @turn, N':', @@SPID), @next = CONCAT(N'proof:runs:', 1 - @turn, N':', @@SPID),
    @go = CONCAT(N'proof:go:', @turn, N':', @@SPID);
EXEC sqlsem.proof_tell @line, @locals, @wants;
EXEC @rc = sys.sp_getapplock @next, 'Exclusive', 'Session', 10000, 'public';
EXEC @rc = sys.sp_releaseapplock @runs, 'Session', 'public';
EXEC @rc = sys.sp_getapplock @go, 'Exclusive', 'Session', 60000, 'public';
EXEC @rc = sys.sp_releaseapplock @go, 'Session', 'public';
IF APPLOCK_TEST(N'public', N'proof:free', N'Exclusive', N'Session') = 0
BEGIN
    EXEC @rc = sys.sp_releaseapplock N'proof:client', 'Session', 'public';
    EXEC @rc = sys.sp_releaseapplock @next, 'Session', 'public';
END;
""",
    "proof_lock": """
CREATE PROCEDURE sqlsem.proof_lock @resource nvarchar(255), @mode varchar(32), @owner varchar(32), @wait int,
    @who varchar(32)
AS
SET NOCOUNT ON;
DECLARE @rc int = -1, @done int, @waits nvarchar(255) = CONCAT(N'proof:q:', @resource),
    @late nvarchar(60) = CONCAT(N'proof:late:', @@SPID), @wants nvarchar(300) = CONCAT(@wait, N'|', @resource);
IF APPLOCK_MODE(N'public', N'proof:client', N'Session') = N'NoLock'
BEGIN
    EXEC @rc = sys.sp_getapplock @resource, @mode, 'Session', @wait, 'public';
    RETURN @rc;
END;
-- Nobody passes those who wait, but who has the lock already.
IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
        OR APPLOCK_TEST(N'public', @waits, N'Exclusive', N'Session') = 1
    EXEC @rc = sys.sp_getapplock @resource, @mode, 'Session', 0, 'public';
IF @rc <> -1 OR @wait = 0 RETURN @rc;
EXEC @done = sys.sp_getapplock @waits, 'Shared', 'Session', 0, 'public';
SET @rc = -2;
WHILE @rc = -2
BEGIN
    EXEC sqlsem.proof_stop N'waits', N'', @wants;
    IF APPLOCK_TEST(N'public', @late, N'Exclusive', N'Session') = 0
        SET @rc = -1;
    ELSE
    BEGIN
        IF APPLOCK_MODE(N'public', N'proof:client', N'Session') <> N'NoLock' SET @wait = 0;
        EXEC @rc = sys.sp_getapplock @resource, @mode, 'Session', @wait, 'public';
        IF @rc = -1 AND @wait = 0 SET @rc = -2;
        IF @rc >= 0 SET @rc = 1;
    END;
END;
EXEC @done = sys.sp_releaseapplock @waits, 'Session', 'public';
RETURN @rc;
""",
    "proof_begin": """
CREATE PROCEDURE sqlsem.proof_begin
AS
SET NOCOUNT ON;
DECLARE @rc int, @runs nvarchar(60) = CONCAT(N'proof:runs:0:', @@SPID);
EXEC @rc = sys.sp_getapplock N'proof:client', 'Shared', 'Session', 0, 'public';
EXEC @rc = sys.sp_getapplock @runs, 'Exclusive', 'Session', 0, 'public';
""",
    "proof_end": """
CREATE PROCEDURE sqlsem.proof_end
AS
SET NOCOUNT ON;
DECLARE @zero nvarchar(60) = CONCAT(N'proof:runs:0:', @@SPID), @one nvarchar(60) = CONCAT(N'proof:runs:1:', @@SPID);
EXEC sqlsem.proof_tell N'done', N'', N'';
EXEC sqlsem.proof_drop N'proof:client';
EXEC sqlsem.proof_drop @zero;
EXEC sqlsem.proof_drop @one;
""",
    # The scheduler's: let a client go on, until it stops again, or has ended. @late: its wait has taken too long.
    "proof_step": """
CREATE PROCEDURE sqlsem.proof_step @session int, @turn int, @late int
AS
SET NOCOUNT ON;
DECLARE @rc int, @done int, @go nvarchar(60) = CONCAT(N'proof:go:', @turn, N':', @session),
    @runs nvarchar(60) = CONCAT(N'proof:runs:', 1 - @turn, N':', @session),
    @flag nvarchar(60) = CONCAT(N'proof:late:', @session);
IF @late = 1 EXEC @done = sys.sp_getapplock @flag, 'Exclusive', 'Session', 0, 'public';
EXEC @done = sys.sp_releaseapplock @go, 'Session', 'public';
EXEC @rc = sys.sp_getapplock @runs, 'Exclusive', 'Session', 20000, 'public';
EXEC sqlsem.proof_drop @runs;
EXEC @done = sys.sp_getapplock @go, 'Exclusive', 'Session', 20000, 'public';
IF @late = 1 EXEC sqlsem.proof_drop @flag;
SELECT @rc AS rc;
""",
    "proof_reset": f"""
CREATE PROCEDURE sqlsem.proof_reset @slots int
AS
SET NOCOUNT ON;
DELETE FROM dbo.sqlsem_waiter WHERE semaphore_key = N'{RESOURCE.key}';
DELETE FROM dbo.sqlsem_slot WHERE semaphore_key = N'{RESOURCE.key}';
DELETE FROM dbo.sqlsem_semaphore WHERE name_key = N'{RESOURCE.key}';
IF @slots > 0 EXEC sqlsem.internal_declare_1 N'{RESOURCE.key}', N'{NAME}', N'semaphore', @slots;
UPDATE dbo.proof_client SET line = N'', locals = N'', wants = N'', modes = N'';
""",
    "proof_read": f"""
CREATE PROCEDURE sqlsem.proof_read
AS
SET NOCOUNT ON;
SELECT declared_slots, operator_slots, slots_until_us, paused, other_slots, other_us, kind FROM dbo.sqlsem_semaphore
WHERE name_key = N'{RESOURCE.key}';
SELECT slot, token, permit_id, expires_us, lock_mode, revoked_token FROM dbo.sqlsem_slot
WHERE semaphore_key = N'{RESOURCE.key}' ORDER BY slot;
SELECT session_id, line, locals, wants, modes FROM dbo.proof_client;
""",
}


def stepped(name: str, text: str) -> str:
    """Return a procedure's text with its stops, each of which tells all local variables."""
    head, _, body = text.partition("\nAS\n")
    known = re.findall(r"^    @(\w+) ", head, re.MULTILINE)
    lines, made, within, index = body.split("\n"), [], False, 0
    while index < len(lines):
        code = lines[index].split("--")[0].rstrip()
        end = index  # of the statement that begins here, or of what comes before a block of its own
        while code and not _ENDS.search(lines[end]) and end + 1 < len(lines):
            end += 1
        whole = "\n".join(lines[index : end + 1])
        if code.lstrip().startswith("DECLARE"):
            known += re.findall(r"@(\w+) (?!=)\w", whole)
        starts = not re.match(r"\s*(ELSE|END|DECLARE)\b", code)
        if starts and not within and (_SHARED.search(whole) or "BEGIN TRANSACTION" in whole):
            condition = _CONDITION.match(whole)
            guard = condition[1] if condition and not _OTHERS.search(condition[1]) else "1 = 1"
            shown = _joined([each for each in known if each not in _CONSTANT])
            made.append(f"IF {guard}\nBEGIN\n    SET @proof = {shown};")
            made.append(f"    EXEC sqlsem.proof_stop N'{name}:{index}', @proof, N'';\nEND;")
        within = (within or "BEGIN TRANSACTION" in whole) and "COMMIT TRANSACTION" not in whole
        made += lines[index : end + 1]
        index = end + 1
    body = "\n".join(made).replace("sys.sp_getapplock", "sqlsem.proof_lock")
    body = body.replace("ORDER BY acquired_us", "ORDER BY acquired_us, slot")  # which are the same by a stopped clock
    return f"{head}\nAS\nDECLARE @proof nvarchar(4000);\n{body}".replace("SYSUTCDATETIME()", _NOW)


def _joined(variables: list[str]) -> str:
    """Return an expression for all of them in one text; some servers take 100 arguments at the most."""
    some = [variables[first : first + 20] for first in range(0, len(variables), 20)]
    parts = ["CONCAT({}, N'')".format(", N' ', ".join(f"@{each}" for each in part)) for part in some]
    return "CONCAT({}, N'')".format(", N' ', ".join(parts))


def permit_of(number: int) -> str:
    """Return the permit id of a client's request."""
    return f"c{number:x}".ljust(32, "0")


def request(number: int, **options: Any) -> Request:
    """Return a client's request."""
    who = HolderIdentity("host", 1, "thread", "proof", "", f"{number:x}".ljust(32, "0"))
    values = {"slots": None, "take": 1, "lease": 60.0, "fair": True, "holder": who} | options
    return Request(RESOURCE, permit_of(number), **values)


class Client:
    """A thread with a lock session of its own, and the backend that works on it."""

    def __init__(self, number: int, alias: str) -> None:
        self.number, self.alias = number, alias
        self.backend = ApplockBackend(alias)
        self.backend.announce(lambda granted, sent, resource, *, at_once: self.got(granted))
        self.session: Any = None
        #: Which of the scheduler's two locks it waits for, and whether the scheduler has them.
        self.turn, self.met = 0, False
        self.wanted, self.slots = request(number), 1
        self.is_dead = False
        open_one = self.backend.pool._open_one
        self.backend.pool._open_one = lambda asked: self._alive() or open_one(asked)  # type: ignore[method-assign]
        self.holds: Acquired | None = None
        self.error: BaseException | None = None
        self._work, self.took_first, self.ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
        self._program: Callable[[Client], object] | None = None
        self.ended.set()
        threading.Thread(target=self._run, daemon=True, name=f"proof-{number}").start()

    def _alive(self) -> None:
        if self.is_dead:
            raise BackendError("the process is dead")

    def got(self, granted: Any) -> None:
        """Note a grant."""
        self.holds = Acquired(self.wanted, granted.grant)

    def has_session(self) -> bool:
        """Open the one session that it works on, if the last one has ended. Returns whether it is a new one."""
        if self.session is not None and not self.session.ended:
            return False
        self.session = self.backend.pool.alone()
        self.backend.pool.give_back(self.session)
        self.met = False
        return True

    def give_back(self) -> None:
        """Release what it holds."""
        if self.holds is not None:
            held, self.holds = self.holds, None
            self.backend.release(None, held)  # type: ignore[arg-type]
            self.tell()

    def tell(self) -> None:
        """Tell which locks it has, as one that does nothing more."""
        self.do("EXEC sqlsem.proof_tell N'done', N'', N''")

    def clear(self) -> None:
        """Free whatever the last run has left. It is not stopped meanwhile."""
        self.holds, self.error = None, None
        self.session.unclear.clear()
        self.session.unclear[RESOURCE.key] = (lock_names(NAME), MOST_SLOTS, True)
        self.session.clean(RESOURCE.key)
        self.backend.pool._by_permit.clear()

    def do(self, text: str, *parameters: Any) -> None:
        """Run a statement on its session."""
        self.session._raw.cursor().execute(text, parameters)

    def start(self, program: Callable[[Client], object] | None) -> None:
        """Run a program up to its first stop; ``None`` ends the thread."""
        self._program = program
        self.ended.clear()
        self._work.release()

    def _run(self) -> None:
        while True:
            self._work.acquire()
            if self._program is None:
                self.backend.pool.close()
                connections[self.alias].close()
                self.ended.set()
                return
            try:
                self.do("EXEC sqlsem.proof_begin")
                self.took_first.release()
                self.do("EXEC sqlsem.proof_stop N'begins', N'', N''")
                self._program(self)
            except Exception as error:
                self.error = error
            with contextlib.suppress(Exception):  # it may have been killed
                self.do("EXEC sqlsem.proof_end")
            self.ended.set()


@dataclass(frozen=True)
class Told:
    """What a client told when it stopped."""

    line: str = ""
    locals: str = ""
    wants: str = ""
    modes: tuple[str, ...] = ()

    @property
    def has(self) -> set[str]:
        """The locks of the name that it has, in whatever mode."""
        return {each for each, mode in zip(RESOURCES, self.modes, strict=False) if mode != "NoLock"}

    @property
    def slots(self) -> set[str]:
        return self.has & set(RESOURCES[1 : MOST_SLOTS + 1])

    @property
    def waits_for(self) -> str:
        """The lock that it waits for, if it does."""
        return self.wants.partition("|")[2] if self.line == "waits" else ""

    @property
    def endless(self) -> bool:
        """Whether its wait never takes too long."""
        return int(self.wants.partition("|")[0] or 0) >= ENDLESS


@dataclass(frozen=True)
class Seen:
    """The rows, and what each client told, at an instant at which all have stopped."""

    names: tuple[tuple[Any, ...], ...]
    slots: tuple[tuple[Any, ...], ...]
    clients: tuple[Told, ...]

    @property
    def bound(self) -> int:
        if not self.names:
            return 0
        declared, operator, until = self.names[0][:3]
        return declared if operator is None or (until is not None and until <= NOW_US) else operator

    @property
    def paused(self) -> bool:
        return any(name[3] for name in self.names)

    def is_free_for(self, number: int, resource: str) -> bool:
        """Whether one that waits first for a lock would get it: nobody else has it, in any mode."""
        index = RESOURCES.index(resource)
        modes = [told.modes[index] for told in self.clients if told.modes and told is not self.clients[number]]
        return all(mode == "NoLock" for mode in modes)


class World:
    """The procedures with their stops in a test database, their clients, and what others see."""

    def __init__(self, alias: str, most: int = 6, mistake: tuple[str, str] = ("", "")) -> None:
        """``mistake``: of ``internal_acquire_1``, what is written there, and what in its place."""
        self.alias = alias
        self.raw = tds.raw_connection(alias)
        self.do(
            "CREATE TABLE dbo.proof_client (session_id int PRIMARY KEY, line nvarchar(60), locals nvarchar(4000),"
            " wants nvarchar(300), modes nvarchar(1000))"
        )
        for text in _HELPERS.values():
            self.do(text)
        for name in STEPPED:
            text = calls.files()[name]
            if name == "internal_acquire_1":
                assert mistake[0] in text, f"{name} has no {mistake[0]!r}"
                text = text.replace(*mistake)
            self._alter(stepped(name, text))
        self.clients = [Client(number, alias) for number in range(most)]

    def close(self) -> None:
        """Put the procedures back that ship."""
        for client in self.clients:
            client.start(None)
            client.ended.wait(10)
            if client.session is not None:
                client.session.end("closed")
        self.do("EXEC sqlsem.proof_reset 0")
        for name in STEPPED:
            self._alter(calls.files()[name])
        for name in _HELPERS:
            self.do(f"DROP PROCEDURE sqlsem.{name}")
        self.do("DROP TABLE dbo.proof_client")
        self.raw.close()

    def _alter(self, text: str) -> None:
        self.do(text.replace("CREATE OR ALTER PROCEDURE", "ALTER PROCEDURE", 1))  # a stand-in knows no other

    def do(self, text: str, *parameters: Any) -> list[list[tuple[Any, ...]]]:
        """Run a batch, and return the rows of each of its results."""
        cursor, found = self.raw.cursor(), []
        with contextlib.closing(cursor):
            cursor.execute(text, parameters)
            while True:
                if cursor.description is not None:
                    found.append([tuple(row) for row in cursor.fetchall()])
                if not cursor.nextset():
                    return found

    def get(self, resource: str, wait: int = 20_000) -> None:
        """Take one of the scheduler's own locks."""
        found = self.do(
            "SET NOCOUNT ON; DECLARE @rc int, @name nvarchar(60) = ?, @wait int = ?;"
            " EXEC @rc = sys.sp_getapplock @name, 'Exclusive', 'Session', @wait, 'public'; SELECT @rc;",
            resource,
            wait,
        )
        assert found[-1][0][0] >= 0, f"the scheduler does not get {resource!r}"

    def drop(self, resource: str) -> None:
        """Give it back, if it has it."""
        self.do("EXEC sqlsem.proof_drop ?", resource)

    def is_free(self, resource: str) -> bool:
        """Whether nobody has a lock."""
        found = self.do("SELECT APPLOCK_TEST(N'public', ?, N'Exclusive', N'Session')", resource)
        return bool(found[-1][0][0])

    def read(self) -> Seen:
        """Read all."""
        names, slots, told = self.do("EXEC sqlsem.proof_read")
        by_session = {row[0]: Told(*row[1:4], tuple((row[4] or "").split("|")) if row[4] else ()) for row in told}
        clients = tuple(
            by_session.get(client.session.session_id, Told()) if client.session is not None else Told()
            for client in self.clients
        )
        return Seen(tuple(names), tuple(slots), clients)

    # Clients.

    def begin(self, scenario: Scenario) -> None:
        """Put everything back; then each program's client stops before its first step."""
        operations = [OPERATIONS[name] for name in scenario.names]
        first = sum(operation.holder for operation in operations)
        others = range(len(operations), len(operations) + scenario.held - first)
        for client in self.clients:
            if client.has_session():
                self.do("INSERT INTO dbo.proof_client (session_id) VALUES (?)", client.session.session_id)
            client.clear()
            client.slots = scenario.slots
        self.do("EXEC sqlsem.proof_reset ?", scenario.slots)
        for client in [*self.clients[:first], *(self.clients[each] for each in others)]:
            grant = client.backend.claim(None, client.wanted)
            assert grant is not None, (
                f"{[each for each in RESOURCES if not self.is_free(each)]} are not free: {self.read()}"
            )
            client.holds = Acquired(client.wanted, grant)
            client.tell()
        for client, operation in zip(self.clients, operations, strict=False):
            session = client.session.session_id
            if not client.met:
                self.get(f"proof:go:0:{session}")
                self.get(f"proof:go:1:{session}")
                client.met = True
            client.turn = 0
            client.start(operation.program)
            assert client.took_first.acquire(timeout=20), "a client does not begin"
            self.get(f"proof:runs:0:{session}")
            self.drop(f"proof:runs:0:{session}")

    def step(self, client: Client, *, late: bool = False) -> None:
        """Let a client take its step."""
        ((rc,),) = self.do("EXEC sqlsem.proof_step ?, ?, ?", client.session.session_id, client.turn, int(late))[-1]
        assert rc >= 0, f"client {client.number} does not come back"
        client.turn = 1 - client.turn

    def kill(self, client: Client) -> None:
        """End a client's session, and wait until its locks are free. Its process does nothing more, either."""
        client.is_dead = True
        self.do(f"KILL {client.session.session_id}")
        assert client.ended.wait(20), "a client outlives its session"
        runs = f"proof:runs:{1 - client.turn}:{client.session.session_id}"
        self.get(runs)  # that it gives back too
        self.drop(runs)
        alive = "SELECT COUNT(*) FROM sys.dm_exec_sessions WHERE session_id = ?"
        wait_until(lambda: not self.do(alive, client.session.session_id)[-1][0][0], what="the session is gone")
        for turn in (0, 1):
            self.drop(f"proof:go:{turn}:{client.session.session_id}")
        client.session.end("killed")
        client.holds, client.error, client.is_dead = None, None, False

    def drain(self) -> None:
        """Let all that are under way come to their ends by themselves, and give back what they get."""
        self.do(f"UPDATE dbo.sqlsem_semaphore SET paused = 0 WHERE name_key = N'{RESOURCE.key}'")
        self.get("proof:free")
        left = [client for client in self.clients if not client.ended.is_set()]
        for client in left:
            self.drop(f"proof:go:{client.turn}:{client.session.session_id}")
        for _ in range(2000):
            for client in self.clients:
                if client.ended.is_set():
                    client.give_back()
            if all(client.ended.wait(0.01) for client in left):
                break
        else:
            raise AssertionError(f"clients do not come to an end: {self.read()}")
        for client in self.clients:
            client.give_back()
        self.drop("proof:free")
        for client in left:
            self.get(f"proof:go:{client.turn}:{client.session.session_id}")


# What clients do.


def _try(client: Client) -> None:
    client.wanted = request(client.number, slots=client.slots)
    grant = client.backend.claim(None, client.wanted)  # type: ignore[arg-type]
    if grant is not None:
        client.holds = Acquired(client.wanted, grant)


def _acquire(client: Client, patience: float | None = None, **options: Any) -> None:
    """What the thread does that stands in line for a process, until its first answer."""
    client.wanted = request(client.number, slots=client.slots, **options)
    line = Line(client.backend.claims, lambda line: True)
    place = Place(arrived=0.0, waiting=1, patience=patience)
    line.enrol(client.wanted, place, first=True)
    session = client.backend.pool.alone()
    try:
        line._ask(session, client.wanted)
        if line.is_head and client.holds is None:  # a pause: it does not stay for its end
            session.unclear[RESOURCE.key] = (lock_names(NAME), None, True)
            session.clean(RESOURCE.key)
    finally:
        client.backend.pool.give_back(session)


def _release(client: Client) -> None:
    held, client.holds = client.holds, None
    assert held is not None
    client.backend.release(None, held)  # type: ignore[arg-type]


def _renew(client: Client) -> None:
    held = client.holds
    assert held is not None
    renewal = client.backend.renew(None, [held])  # type: ignore[arg-type]
    assert not renewal.lost, f"the permit is said to be lost: {renewal.lost}"


def _by_operator(act: Callable[[Any], object]) -> Callable[[Client], None]:
    return lambda client: act(client.backend) and None


@dataclass(frozen=True)
class Operation:
    """A kind of client, and whether it begins as a holder."""

    program: Callable[[Client], object]
    holder: bool = False
    take: int = 0


OPERATIONS: Final = {
    "try": Operation(_try, take=1),
    "acquire": Operation(_acquire, take=1),
    "acquire for a while": Operation(functools.partial(_acquire, patience=0.05), take=1),
    "acquire two": Operation(functools.partial(_acquire, take=2), take=2),
    "acquire all": Operation(functools.partial(_acquire, take=0, mode=WHOLE), take=1),
    "release": Operation(_release, holder=True),
    "renew": Operation(_renew, holder=True),
    "shrink": Operation(_by_operator(lambda backend: backend.set_slots(NAME, 1))),
    "grow": Operation(_by_operator(lambda backend: backend.set_slots(NAME, MOST_SLOTS))),
    "pause": Operation(_by_operator(lambda backend: backend.set_paused(NAME, True))),
    "resume": Operation(_by_operator(lambda backend: backend.set_paused(NAME, False))),
    "purge name": Operation(_by_operator(lambda backend: backend.purge_idle(NAME))),
}


@dataclass(frozen=True)
class Scenario:
    """Operations at once, holders first; the number of slots, and how many of them are held at the beginning."""

    names: tuple[str, ...]
    slots: int
    held: int

    @property
    def base(self) -> tuple[int, int]:
        return self.slots, self.held

    def __str__(self) -> str:
        return f"{' | '.join(self.names)}, {self.held} of {self.slots} held"


# The exploration.

#: Its wait has taken too long; it is granted what it waits for, which is no choice, but the server's.
LATE, GRANTED = "late", "granted"


@dataclass
class Window:
    """What has been so since a client began."""

    #: Who stood in line then, and does so still.
    ahead: set[int]
    #: The same when it got its slots.
    passed: set[int] | None = None
    bound: int = 0
    unpaused: bool = False


@dataclass
class Judge:
    """Compares what is seen after a step with what was seen before."""

    seen: Seen
    names: tuple[str, ...]
    windows: dict[int, Window] = field(default_factory=dict)
    #: Who waits for which lock, in the order in which they came.
    queue: list[tuple[str, int]] = field(default_factory=list)
    #: What each client has told so far: two that have seen the same go on in the same ways.
    histories: dict[int, int] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)

    def is_over(self, number: int) -> bool:
        """Whether a client has ended, or has never begun."""
        return number in self.dead or self.seen.clients[number].line in ("done", "")

    def standing(self) -> set[int]:
        """Return who stands at the gate, or is the first in line and has not got its slots."""
        return {
            number
            for number, name in enumerate(self.names)
            if OPERATIONS[name].take
            and (GATE in self.seen.clients[number].has or self.seen.clients[number].waits_for == GATE)
            and len(self.seen.clients[number].slots) < OPERATIONS[name].take
        }

    def step(self, number: int, seen: Seen, clients: Sequence[Client]) -> None:
        """Judge what one client's step has changed."""
        before, self.seen = self.seen, seen
        told = seen.clients[number]
        self.histories[number] = hash((self.histories.get(number), told))
        self.queue = [(lock, each) for lock, each in self.queue if seen.clients[each].waits_for == lock]
        if told.waits_for and (told.waits_for, number) not in self.queue:
            self.queue.append((told.waits_for, number))
        known = {row[0]: row for row in before.slots}
        for slot, token, permit, *_ in seen.slots:
            _, old, holder, *_ = known.get(slot, (slot, -1, None))
            hold(token >= old, f"the token of slot {slot} went back")
            hold(permit in (None, holder) or token > old, f"slot {slot} was granted anew under its old token")
        self._see_windows(number, told)
        for client in clients:
            if client.holds is not None and seen.clients[client.number].line == "done":
                has = seen.clients[client.number].slots
                wanted = {f"{slot}-{BASE}" for slot in client.holds.grant.slots[: max(1, client.wanted.take)]}
                hold(wanted <= has, f"client {client.number} holds {wanted}, and has only {has}")
        if self.is_over(number) and clients[number].holds is not None and number not in self.told:
            self.told.add(number)
            if OPERATIONS[self.names[number]].take:
                self._judge_grant(number, clients)

    def _see_windows(self, number: int, told: Told) -> None:
        standing = self.standing()
        for each, window in self.windows.items():
            window.ahead &= standing - {each}
            window.bound = max(window.bound, self.seen.bound)
            window.unpaused = window.unpaused or not self.seen.paused
        if number not in self.windows:
            self.windows[number] = Window(standing - {number}, None, self.seen.bound, not self.seen.paused)
        window = self.windows[number]
        if len(told.slots) < max(1, OPERATIONS[self.names[number]].take):
            window.passed = None
        elif window.passed is None:
            window.passed = set(window.ahead)

    def _judge_grant(self, number: int, clients: Sequence[Client]) -> None:
        window = self.windows[number]
        hold(window.unpaused, f"client {number} was served in a pause")
        hold(not window.passed, f"client {number} was served before {window.passed}, who had waited longer")
        holds = [client.holds for client in clients if client.holds is not None and self.is_over(client.number)]
        held = sum(len(each.grant.slots) for each in holds)
        hold(held <= window.bound, f"{held} slots are held of {window.bound}")


class Explorer(Search[Judge]):
    """Runs scenarios: some operations at once, from a beginning with some slots, of which some are held."""

    def __init__(self, world: World) -> None:
        self.world = world

    def explore(self, scenario: Scenario, *, late: int = 1, faults: int = 0, until: float = 0.0) -> Findings:
        """Run all schedules, or those until some instant.

        ``late`` is how many waits take too long in one schedule at the most, ``faults`` how many clients crash.
        """
        self._scenario, self._names = scenario, scenario.names
        self._most = {LATE: late, CRASH: faults}
        return self.search(Findings(scenario), until)

    @property
    def clients(self) -> list[Client]:
        """Those who do something."""
        return self.world.clients[: len(self._names)]

    def _start(self) -> None:
        self.world.begin(self._scenario)

    def _judge_of_beginning(self) -> Judge:
        return Judge(self.world.read(), self._names)

    def _check_the_way(self, judge: Judge, chosen: Sequence[Choice]) -> None:
        seen = self._read(judge)
        assert seen == judge.seen, f"the same schedule has led elsewhere: {chosen}: {judge.seen}, then {seen}"

    def _drain(self) -> None:
        self.world.drain()

    def _choices(self, judge: Judge, chosen: Sequence[Choice]) -> Iterator[Choice]:
        under_way = [client for client in self.clients if not judge.is_over(client.number)]
        waiting = [client for client in under_way if judge.seen.clients[client.number].waits_for]
        yield from ((client.number, GO) for client in under_way if client not in waiting)
        if sum(word == LATE for _, word in chosen) < self._most[LATE]:
            yield from ((each.number, LATE) for each in waiting if not judge.seen.clients[each.number].endless)
        if sum(word == CRASH for _, word in chosen) < self._most[CRASH]:
            yield from ((client.number, CRASH) for client in under_way)

    def _go(self, choice: Choice, judge: Judge | None) -> None:
        number, word = choice
        client = self.world.clients[number]
        if word == CRASH:
            self.world.kill(client)
        else:
            self.world.step(client, late=word == LATE)
        if judge is None:
            return
        if word == CRASH:
            judge.dead.add(number)
        seen = self._read(judge)
        if seen.clients[number].line == "done":
            assert client.ended.wait(20)
        if client.error is not None and word != CRASH:
            raise BrokenError(f"{self._names[number]} failed: {client.error!r}")
        judge.step(number, seen, self.world.clients)

    def _read(self, judge: Judge) -> Seen:
        """Read all; the dead tell nothing."""
        seen = self.world.read()
        told = (Told() if number in judge.dead else each for number, each in enumerate(seen.clients))
        return Seen(seen.names, seen.slots, tuple(told))

    def _follow_up(self, judge: Judge, chosen: list[Choice]) -> None:
        """Have each lock that is free go to who waited first for it."""
        while True:
            firsts: dict[str, int] = {}
            for lock, number in judge.queue:
                firsts.setdefault(lock, number)
            ready = [(lock, each) for lock, each in firsts.items() if judge.seen.is_free_for(each, lock)]
            if not ready:
                return
            lock, number = ready[0]
            chosen.append((number, GRANTED))
            self._go(chosen[-1], judge)
            hold((lock, number) not in judge.queue, f"client {number} does not get {lock!r}, which is free")

    def _key(self, judge: Judge, chosen: Sequence[Choice]) -> Any:
        seen = judge.seen
        each = tuple(
            (seen.clients[client.number], judge.histories.get(client.number), judge.is_over(client.number))
            for client in self.clients
        )
        windows = repr(sorted(judge.windows.items()))
        counts = tuple(sum(word == kind for _, word in chosen) for kind in (LATE, CRASH))
        return hash((seen.names, seen.slots, each, windows, tuple(judge.queue), counts))

    def _end(self, judge: Judge, chosen: list[Choice]) -> None:
        """All have ended, or wait: whoever can be served gets served, and nothing stays."""
        key = (judge.seen, tuple(judge.queue))
        if key in self._ends:
            return
        self._ends.add(key)
        judge, late = copy.deepcopy(judge), 0
        chosen = list(chosen)
        while waiting := [client for client in self.clients if not judge.is_over(client.number)]:
            held = [each for each in self.world.clients if each.holds is not None and judge.is_over(each.number)]
            impatient = [each for each in waiting if not judge.seen.clients[each.number].endless]
            taken = sum(len(client.holds.grant.slots) for client in held if client.holds is not None)
            free = judge.seen.bound - taken
            first = next((number for lock, number in judge.queue if lock != GATE), waiting[0].number)
            take = OPERATIONS[self._names[first]].take
            if self._names[first] == "acquire all":
                take = judge.seen.bound
            if judge.seen.paused:
                self.world.do(f"UPDATE dbo.sqlsem_semaphore SET paused = 0 WHERE name_key = N'{RESOURCE.key}'")
            elif late > 3 * len(waiting):
                hold(free < take, f"{free} slots are free, and client {first} waits: {chosen}")
                hold(bool(held), f"{[each.number for each in waiting]} wait for each other: {chosen}")
                held[0].give_back()
                late = 0
                judge.seen = self._read(judge)
            for client in impatient[:1]:
                late += 1
                self._to_rest(client, LATE, judge, chosen)
            if not impatient:
                late += 1
            for client in list(waiting):
                if not judge.is_over(client.number) and not judge.seen.clients[client.number].waits_for:
                    self._to_rest(client, GO, judge, chosen)
            self._grant_all(judge, chosen)
        for client in self.world.clients:
            client.give_back()
        locks = [each for each in RESOURCES if not self.world.is_free(each)]
        hold(not locks, f"{locks} are left: {chosen}")

    def _grant_all(self, judge: Judge, chosen: list[Choice]) -> None:
        while True:
            before = len(chosen)
            self._follow_up(judge, chosen)
            for number in {number for number, word in chosen[before:] if word == GRANTED}:
                client = self.world.clients[number]
                if not judge.is_over(client.number) and not judge.seen.clients[number].waits_for:
                    self._to_rest(client, GO, judge, chosen)
            if len(chosen) == before:
                return

    def _to_rest(self, client: Client, word: str, judge: Judge, chosen: list[Choice]) -> None:
        """Let a client go on until it has ended or waits."""
        while not judge.is_over(client.number):
            chosen.append((client.number, word))
            self._go(chosen[-1], judge)
            word = GO
            if judge.seen.clients[client.number].waits_for:
                return
