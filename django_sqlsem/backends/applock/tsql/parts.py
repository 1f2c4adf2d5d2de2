"""The T-SQL of application locks. One batch is one round trip; ``?`` marks its parameters, in the order of its tuple.

Traps behind the wording, from the documentation of ``sp_getapplock`` and captures of SQL Server 2025: all five
parameters are always passed, since the defaults are traps; the verdict is the return code, as a refusal raises
nothing; ``SET NOCOUNT ON``, as the procedures' row counts would hide the result; an applock is re-entrant, so a batch
asks ``APPLOCK_MODE`` before it trusts a grant; but for the shortest one, which the pool keeps off such sessions.

The types of a batch's parameters, as drivers are told them: always those that the batch itself declares.

Drivers that are not told send each text as one that is as long as its value (``nvarchar(7)``). A server then prepares
the batch anew, and keeps one more plan of it, for each combination of lengths: of names, threads, labels, users.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from django_sqlsem.core.modes import RWLOCK, WRITER
from django_sqlsem.database.cursors import size_of
from django_sqlsem.database.sqlserver import FOREIGN

#: Lengths are in UTF-16 units, of which a character may take two; what is longer is cut without a word.
TYPES: Final = {
    "stamp": "varchar(60)",
    "base": "nvarchar(255)",
    "gate": "nvarchar(255)",
    "mode": "varchar(32)",
    "lock_mode": "nvarchar(8)",
    "resource": "nvarchar(255)",
    "fence": "nvarchar(60)",
    "told": "nvarchar(60)",
    "csv": "nvarchar(max)",
    "key": "nvarchar(32)",
    "kind": "nvarchar(16)",
    "name": "nvarchar(400)",
    "permit": "nvarchar(32)",
    "before": "nvarchar(32)",
    "host": "nvarchar(510)",
    "thread": "nvarchar(200)",
    "label": "nvarchar(400)",
    "user": "nvarchar(300)",
    "process": "nvarchar(32)",
    "pid": "bigint",
    "lease": "bigint",
    "age": "bigint",
    "ticket": "nvarchar(32)",
    "session_id": "int",
    "session_us": "bigint",
}


def type_of(name: str) -> str:
    """Return the type of a parameter; one of several is numbered, as ``key0``."""
    return TYPES.get(name) or TYPES.get(name.rstrip("0123456789"), "int")


@functools.lru_cache(maxsize=1000)
def input_sizes(parameters: tuple[str, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return what ``Cursor.setinputsizes()`` takes: type, length or digits, and 0; a length of 0 is ``max``."""
    return tuple(size_of(type_of(name)) for name in parameters)


#: How long a batch waits for a row of ours, in milliseconds.
ROW_PATIENCE_MS: Final = 2000

# A small table would be scanned, and then each statement waits for the rows of all other names.
#: Follows a table some of whose rows are read by the first column of one of its indexes.
SEEK: Final = "WITH (FORCESEEK)"
#: The same if they are written.
SEEK_ROWS: Final = "WITH (ROWLOCK, FORCESEEK)"

NOW: Final = "DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())"

# What a batch answers in its column ``status``. Below zero: the return code of sp_getapplock itself.
DONE: Final = 0
#: The name, or one of its slots, has no row yet.
NEW: Final = 1
#: No slot is free, or others wait.
BUSY: Final = 2
#: A slot is free, and others wait.
GATED: Final = 3
PAUSED: Final = 4
KIND: Final = 5
#: More is wanted than there is.
NEVER: Final = 6
#: A row could not be written; ``error`` and ``message`` say why.
ROW_FAILED: Final = 8
#: Something is so that the short batch does not do: it has taken nothing.
ODD: Final = 10

#: What a claim's ``fair`` says if it does not yield, as the head of the line has stopped.
PAST: Final = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """A text and the names of its parameters, in order."""

    text: str
    parameters: tuple[str, ...]


def get(resource: str, mode: str, timeout: str, result: str = "@rc") -> str:
    """Return the statement; ``mode`` is a mode's name, or a variable, and ``result`` gets the return code."""
    text = mode if mode.startswith("@") else f"'{mode}'"
    return (
        f"EXEC {result} = sys.sp_getapplock @Resource = {resource}, @LockMode = {text}, @LockOwner = 'Session',"
        f" @LockTimeout = {timeout}, @DbPrincipal = 'public';"
    )


def give(resource: str) -> str:
    return (
        f"EXEC @done = sys.sp_releaseapplock @Resource = {resource}, @LockOwner = 'Session', @DbPrincipal = 'public';"
    )


def holds(resource: str) -> str:
    return f"APPLOCK_MODE(N'public', {resource}, N'Session') <> N'NoLock'"


def available(resource: str, mode: str) -> str:
    """This session could have it at once: nobody's lock, and nobody who waits, is in the way."""
    return f"APPLOCK_TEST(N'public', {resource}, {mode}, N'Session') = 1"


def taken(resource: str) -> str:
    """Another session holds it, or waits for it."""
    return f"APPLOCK_TEST(N'public', {resource}, N'Exclusive', N'Session') = 0"


#: Nothing is done on a session that is not the one that we opened: a pool may have put another in its place.
CHECK: Final = (
    "IF CONTEXT_INFO() IS NULL OR CAST(SUBSTRING(CONTEXT_INFO(), 1, DATALENGTH(@stamp)) AS varchar(60)) <> @stamp"
    f" SET @status = {FOREIGN};"
)


def batch(parameters: tuple[str, ...], body: str, *, patient: bool = True) -> Batch:
    """Declare the parameters and make a batch; ``patient``: it may meet locked rows, and waits a moment for them."""
    declared = ", ".join(f"@{name} {type_of(name)} = ?" for name in parameters)
    limit = f" SET LOCK_TIMEOUT {ROW_PATIENCE_MS};" if patient else ""
    head = f"SET NOCOUNT ON;{limit}\nDECLARE {declared};\n"
    return Batch(head + body.strip() + "\n", parameters)


#: Free a slot's row, if it still carries the permit's id, and note how long it was held.
FREE: Final = f"""
UPDATE s SET permit_id = NULL, expires_us = NULL,
    held_us = CASE WHEN {NOW} <= acquired_us THEN held_us WHEN held_us = 0 THEN {NOW} - acquired_us
        ELSE held_us + ({NOW} - acquired_us - held_us) / 8 END
FROM sqlsem_slot AS s {SEEK_ROWS} WHERE semaphore_key = @key AND slot = @slot AND permit_id = @permit;
SET @rows = @rows + @@ROWCOUNT;
"""


@functools.cache
def release(*, record: bool) -> Batch:
    """Free the slots in ``csv`` (``,1,2,``), each row before its lock and only while it carries the permit's id.

    A row that can't be written does not keep its lock.
    """
    body = letting_go(FREE if record else "", CHECK)
    answer = "SELECT @status AS status, @freed AS freed, @rows AS freed_rows, @error AS error, @message AS message;"
    return batch(("stamp", "base", "csv", *(("key", "permit") if record else ())), body + answer)


def letting_go(row: str, check: str) -> str:
    """Return what frees the slots in ``csv``; ``row`` writes the row of one of them, ``check`` comes first."""
    if row:
        row = f"BEGIN TRY {row} END TRY BEGIN CATCH SELECT @error = ERROR_NUMBER(), @message = ERROR_MESSAGE();"
        row = f"{row} END CATCH;"
    return f"""
DECLARE @status int = {DONE}, @done int = 0, @slot int = 0, @rows int = 0, @freed int = 0, @error int = 0,
    @message nvarchar(2048) = N'', @resource nvarchar(255) = N'', @rest nvarchar(max) = SUBSTRING(@csv, 2, LEN(@csv));
{check}
WHILE CHARINDEX(N',', @rest) > 0 AND @status = {DONE}
BEGIN
    SET @slot = CAST(LEFT(@rest, CHARINDEX(N',', @rest) - 1) AS int);
    SET @rest = SUBSTRING(@rest, CHARINDEX(N',', @rest) + 1, LEN(@rest));
    SET @resource = CONCAT(@slot, N'-', @base);
    {row}
    IF {holds("@resource")}
    BEGIN
        {give("@resource")}
        SET @freed = @freed + 1;
    END;
END;
IF @status = {DONE} AND {holds("@base")}
BEGIN
    {give("@base")}
END;
"""


def cleaning(check: str) -> str:
    """Return what frees the gate, the name and its slots up to ``bound`` on this session; ``check`` comes first."""
    return f"""
DECLARE @status int = {DONE}, @done int = 0, @slot int = 0, @freed int = 0, @resource nvarchar(255) = N'';
{check}
WHILE @slot <= @bound AND @status = {DONE}
BEGIN
    SET @resource = CONCAT(@slot, N'-', @base);
    IF {holds("@resource")}
    BEGIN
        {give("@resource")}
        SET @freed = @freed + 1;
    END;
    SET @slot = @slot + 1;
END;
IF @status = {DONE} AND {holds("@base")}
BEGIN
    {give("@base")}
END;
{_give_if_held("CONCAT(@gate, N':s')")}{stepping_out()}"""


def stepping_out() -> str:
    """Return what leaves the line, and all that a head has to say so."""
    said = [_give_if_held(f"CONCAT(@gate, N':{letter}')") for letter in "wu"]
    return f"""{"".join(said)}IF @status = {DONE} AND {holds("@gate")}
BEGIN
    {give("@gate")}
END;
"""


def _give_if_held(resource: str) -> str:
    return f"""SET @resource = {resource};
IF @status = {DONE} AND {holds("@resource")}
BEGIN
    {give("@resource")}
END;
"""


_ROWS: Final = (
    f"IF @key <> N'' SELECT @bound = COALESCE(MAX(slot), 0) FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key;"
)

#: After a claim that was cut short: free whatever it may have got on this session, which holds no other of the name.
#: With a ``key``, as many slots as there are rows.
CLEAN: Final = batch(
    ("stamp", "base", "gate", "bound", "key"),
    cleaning(f"{CHECK}\n{_ROWS}") + "SELECT @status AS status, @freed AS freed;",
)

#: Forget in the rows what a session that has ended held there.
UNRECORD: Final = batch(
    ("key", "permit", "slot"),
    f"""
DECLARE @revoked bigint = 0, @by nvarchar(300) = N'';
UPDATE s SET permit_id = NULL, expires_us = NULL
FROM sqlsem_slot AS s {SEEK_ROWS} WHERE semaphore_key = @key AND permit_id = @permit;
SELECT @revoked = COALESCE(revoked_token, 0), @by = revoked_by FROM sqlsem_slot {SEEK}
WHERE semaphore_key = @key AND slot = @slot;
SELECT @revoked AS revoked_token, @by AS revoked_by;
""",
)

_IF_MISSING: Final = "BEGIN TRY {insert} END TRY BEGIN CATCH IF ERROR_NUMBER() NOT IN (2601, 2627) THROW; END CATCH;"

CREATING: Final = (
    f"DECLARE @slot int = CASE WHEN @kind = N'{RWLOCK}' THEN {WRITER} ELSE 1 END;\n"
    + _IF_MISSING.format(
        insert=f"""
INSERT INTO sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)
SELECT @key, @name, @kind, @slots, {NOW}, 0, 0
WHERE NOT EXISTS (SELECT 1 FROM sqlsem_semaphore {SEEK} WHERE name_key = @key);
"""
    )
    + "\nWHILE @slot <= @slots\nBEGIN\n"
    + _IF_MISSING.format(
        insert=f"""
INSERT INTO sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread, label,
    user_name, process_id, boot_id, channel, revoked_by, lock_mode)
SELECT @key, @slot, CASE WHEN @slot = {WRITER} THEN 1 ELSE 0 END, 0, 0, 0, 0, N'', 0, N'', N'', N'', N'', N'', N'',
    N'', N''
WHERE NOT EXISTS (SELECT 1 FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key AND slot = @slot);
"""
    )
    + "\n    SET @slot = @slot + 1;\nEND;\n"
)

#: Create the rows of a name that has none, or too few.
CREATE: Final = batch(("key", "name", "kind", "slots"), CREATING + "SELECT @slot AS slots;")

DECLARING: Final = f"""
UPDATE m SET other_slots = declared_slots, other_us = {NOW}, declared_slots = @slots, declared_us = {NOW}
FROM sqlsem_semaphore AS m {SEEK_ROWS} WHERE name_key = @key AND declared_slots <> @slots"""

#: Say that this program's number of slots differs from the one that was declared last.
DECLARE: Final = batch(("key", "slots"), DECLARING + ";\nSELECT @@ROWCOUNT AS changed;")

#: When a session logged in, as far as the view of sessions says.
LOGIN_US: Final = "DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time)"

#: Stamp a fresh session, and see that it is fresh: a pool would hand out one with a stamp, and with its locks.
OPEN: Final = Batch(
    f"""SET NOCOUNT ON;
DECLARE @stamp varchar(60) = ?;
DECLARE @before varbinary(128) = CONTEXT_INFO(), @new varbinary(128) = CAST(@stamp AS varbinary(128));
DECLARE @used int = CASE WHEN @before IS NULL THEN 0
    WHEN CAST(SUBSTRING(@before, 1, 7) AS varchar(7)) = 'sqlsem:' THEN 1 ELSE 0 END;
SET CONTEXT_INFO @new;
SELECT @@SPID AS session_id, @used AS used,
    (SELECT {LOGIN_US} FROM sys.dm_exec_sessions WHERE session_id = @@SPID)
    AS session_us;
""",
    ("stamp",),
)
