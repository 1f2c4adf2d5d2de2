"""The T-SQL by which an upgradable reader becomes the writer, and a reader again.

It has the name itself in mode Update, and the lock of the writer's place. The upgrade converts the first to Exclusive:
a conversion goes before all requests that wait. A converted lock keeps the stronger mode until all of its counts are
released; so the way back is to release them, and to take Update again. Nobody of ours comes between, as whoever asks
for the name in mode Update or Exclusive has the writer's place by then. Another program may: then the place is lost.
"""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock.tsql.fences import OF_GATE
from django_sqlsem.backends.applock.tsql.line import SHOWN, UNSTAND, queue_up
from django_sqlsem.backends.applock.tsql.parts import (
    BUSY,
    CHECK,
    DONE,
    FREE,
    PAUSED,
    SEEK,
    SEEK_ROWS,
    Batch,
    batch,
    get,
    give,
    holds,
    stepping_out,
    taken,
)
from django_sqlsem.core.modes import UPDATE, WHOLE, WRITER
from django_sqlsem.database.sqlserver import OWN

_MODE: Final = "APPLOCK_MODE(N'public', @base, N'Session')"
_PLACE: Final = f"CONCAT(N'{WRITER}-', @base)"
_QUIETLY: Final = "BEGIN TRY {text} END TRY BEGIN CATCH SELECT @error = ERROR_NUMBER(), @message = ERROR_MESSAGE();"

_SHOWN_AS: Final = (
    f"UPDATE s SET lock_mode = N'{{mode}}' FROM sqlsem_slot AS s {SEEK_ROWS}"
    " WHERE semaphore_key = @key AND slot = @slot AND permit_id = @permit;"
)
_PAUSED: Final = f"""
IF @status = {DONE} AND EXISTS (SELECT 1 FROM sqlsem_semaphore {SEEK} WHERE name_key = @key AND paused = 1)
    SET @status = {PAUSED};
SELECT @top = MAX(slot) FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key;
"""
#: Whoever waits tells newcomers so, by the gate if nobody has it, and by ``:w``.
_TELL: Final = f"""
IF @status = {DONE} AND NOT {holds("@gate")}
BEGIN
    {get("@gate", "Exclusive", "0")}
END;
SET @resource = CONCAT(@gate, N':w');
IF @status = {DONE} AND NOT {holds("@resource")}
BEGIN
    {get("@resource", "Exclusive", "0")}
END;
"""
#: Readers that are gone may have left transactions that are fenced with their permits.
_FENCES: Final = f"""
SET @i = CASE WHEN {taken("@fence")} THEN 1 ELSE @top + 1 END;
WHILE @i <= @top AND @status = {DONE}
BEGIN
    SET @resource = CONCAT(@fence, N':', @i);
    IF {taken("@resource")}
    BEGIN
        SET @left = @budget - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
        SET @left = CASE WHEN @left > @budget THEN @budget WHEN @left > 0 THEN @left ELSE 0 END;
        {get("@resource", "Exclusive", "@left")}
        IF @rc >= 0
        BEGIN
            {give("@resource")}
        END
        ELSE SET @status = CASE WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    END;
    SET @i = @i + 1;
END;
"""
_WHO: Final = ("host", "pid", "thread", "label", "user", "process")


@functools.cache
def upgrade(*, record: bool, in_line: bool = False) -> Batch:
    """Wait for the readers to leave, ``budget`` milliseconds at the most; only on a session that has no other permit.

    ``permit`` is the upgradable reader's. ``in_line``: keep newcomers out until there is a grant, or ``settle`` is
    called. ``mode`` in the answer is that of the name: Exclusive without a grant must be settled too.
    """
    row = (
        f"IF @status = {DONE}\nBEGIN\n    SET @done = 0;\n    {SHOWN.format(text=_SHOWN_AS.format(mode=WHOLE))}\nEND;\n"
        if record
        else ""
    )
    served = f" IF @ticket <> N'' AND @status = {DONE} {UNSTAND} "
    waiter = ("ticket", "waiting", "take", "lease", "lock_mode", "age", *_WHO)
    return batch(
        ("stamp", "base", "gate", "slot", "slots", "budget", *(("key", "permit") if record else ()),
         *(waiter if record and in_line else ())),
        f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int = 0, @i int = 0, @top int = @slots, @left int = 0,
    @resource nvarchar(255) = N'', @fence nvarchar(60) = {OF_GATE}, @began datetime2(3) = SYSUTCDATETIME();
{CHECK}
IF @status = {DONE} AND {_MODE} NOT IN (N'Update', N'Exclusive') SET @status = {OWN};
{queue_up() if record and in_line else ""}{_TELL if in_line else ""}{_PAUSED if record else ""}
IF @status = {DONE} AND {_MODE} <> N'Exclusive'
BEGIN
    {get("@base", "Exclusive", "@budget")}
    SET @status = CASE WHEN @rc >= 0 THEN {DONE} WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
END;
{_FENCES}{row}{SHOWN.format(text=served) if record and in_line else ""}
DECLARE @answer int = @status;
{stepping_out()}
SELECT @answer AS status, {_MODE} AS mode, @top AS bound;
""",
    )  # fmt: skip


@functools.cache
def settle(*, record: bool) -> Batch:
    """Be an upgradable reader who waits for nothing; with ``keep`` 0, nothing at all any more.

    ``rc`` in the answer is below zero if another program came first: then nothing is kept, as without ``keep``.
    """
    free = f"{_QUIETLY.format(text=FREE)} END CATCH;" if record else ""
    shown = f"{_QUIETLY.format(text=_SHOWN_AS.format(mode=UPDATE))} END CATCH;" if record else ""
    ticket = ("key", "permit", "ticket") if record else ()
    return batch(
        ("stamp", "base", "gate", "slot", "keep", *ticket),
        f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int = 0, @rows int = 0, @freed int = 0, @error int = 0,
    @message nvarchar(2048) = N'', @resource nvarchar(255) = N'';
{CHECK}
IF @status = {DONE} AND @keep = 1
BEGIN
    SET @done = 0;
    {shown}
END;
IF @status = {DONE} AND @keep = 0
BEGIN
    SET @done = 0;
    {free}
END;
{stepping_out()}
WHILE @status = {DONE} AND {holds("@base")} AND (@keep = 0 OR {_MODE} <> N'Update')
BEGIN
    {give("@base")}
END;
IF @status = {DONE} AND @keep = 1 AND NOT {holds("@base")}
BEGIN
    {get("@base", "Update", "0")}
END;
SET @resource = {_PLACE};
IF @status = {DONE} AND (@keep = 0 OR @rc < 0) AND {holds("@resource")}
BEGIN
    {free}
    {give("@resource")}
    SET @freed = 1;
END;
{SHOWN.format(text=f" IF @ticket <> N'' {UNSTAND} ") if record else ""}
SELECT @status AS status, @rc AS rc, @freed AS freed, @error AS error, @message AS message;
""",
    )
