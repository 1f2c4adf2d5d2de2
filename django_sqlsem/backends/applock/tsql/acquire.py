"""The T-SQL that takes slots, at once or after standing in line: see ``applock_sql`` for what it is made of."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock.tsql import sweep
from django_sqlsem.backends.applock.tsql.fences import OF_GATE
from django_sqlsem.backends.applock.tsql.line import PATIENCE_US, SHOWN, UNSTAND, queue_up
from django_sqlsem.backends.applock.tsql.parts import (
    BUSY,
    CHECK,
    DONE,
    KIND,
    NEVER,
    NEW,
    NOW,
    PAUSED,
    ROW_FAILED,
    SEEK,
    SEEK_ROWS,
    Batch,
    batch,
    get,
    give,
    holds,
)
from django_sqlsem.core.modes import WRITER

#: A waiting head's first wait for one slot before it looks at the others, in milliseconds.
FIRST_STEP_MS: Final = 2

_VARIABLES: Final = f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int = 0, @n int = @slots, @count int = 0, @declared int = @slots,
    @i int = 0, @m int = 0, @slot int = 0, @last int = 0, @left int = 0, @intent int = 0, @shrinking int = 0,
    @busy int = 0, @mark bigint = 0, @error int = 0, @message nvarchar(2048) = N'', @tokens nvarchar(max) = N'',
    @csv nvarchar(max) = N',', @resource nvarchar(255) = N'', @rest nvarchar(max) = N'',
    @fence nvarchar(60) = {OF_GATE}, @through varchar(32) = '', @post nvarchar(255) = N'',
    @began datetime2(3) = SYSUTCDATETIME();
"""

RECORD_VARIABLES: Final = """
DECLARE @operator int, @paused bit = 0, @seen nvarchar(16), @top int, @token bigint = 0, @now bigint = 0;
"""

#: How many slots there are.
COUNT: Final = f"""SELECT @declared = declared_slots, @operator = operator_slots, @paused = paused, @seen = kind
    FROM sqlsem_semaphore {SEEK} WHERE name_key = @key;
    SELECT @top = MAX(slot) FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key;
    SET @n = CASE WHEN @operator IS NOT NULL THEN @operator WHEN @slots > 0 THEN @slots ELSE @declared END;"""

#: What the rows say of the name.
_READ: Final = f"""
IF @status = {DONE}
BEGIN
    {COUNT}
    SET @status = CASE
        WHEN @seen IS NULL THEN {NEW}
        WHEN @seen <> @kind THEN {KIND}
        WHEN @take > @n AND (@operator IS NULL OR @take > CASE WHEN @slots > 0 THEN @slots ELSE @declared END)
            THEN {NEVER}
        WHEN @top IS NULL OR @top < @n THEN {NEW}
        WHEN @paused = 1 THEN {PAUSED}
        ELSE {DONE} END;
    IF @status = {KIND} SET @message = @seen;
    -- An operator has left too few: who waits for more is not in the way of the others.
    IF @status = {DONE} AND @take > @n
    BEGIN
        SET @status = {BUSY};
        IF {holds("@gate")}
        BEGIN
            {give("@gate")}
        END;
    END;
END;
"""

_READ_NOTHING: Final = f"""
IF @n < 1 SET @n = 1;
IF @status = {DONE} AND @take > @n SET @status = {NEVER};
"""

#: The row beside one lock.
ROW: Final = f"""SELECT @token = token FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key AND slot = @slot;
            IF @@ROWCOUNT = 0 SET @status = {NEW};
            SET @token = CASE WHEN @token >= @now THEN @token + 1 ELSE @now END;
            UPDATE s SET token = @token, permit_id = @permit, acquired_us = @now, expires_us = @now + @lease,
                lease_us = @lease, host = @host, pid = @pid, thread = @thread, label = @label, user_name = @user,
                process_id = @process, session_id = @session_id, session_us = @session_us, suspect_us = NULL,
                lock_mode = @lock_mode
            FROM sqlsem_slot AS s {SEEK_ROWS} WHERE semaphore_key = @key AND slot = @slot;
            SET @tokens = CONCAT(@tokens, @token, N',');"""


def recording(rows: str) -> str:
    """Return what writes the rows beside the locks. Those are ours, so that nobody else writes them.

    An operator may have acted meanwhile.
    """
    return f"""
IF @status = {DONE}
BEGIN
    BEGIN TRY
        IF @waited = 1
            SELECT @status = CASE WHEN paused = 1 THEN {PAUSED}
                WHEN COALESCE(operator_slots, 0) <> COALESCE(@operator, 0) THEN {BUSY} ELSE @status END
            FROM sqlsem_semaphore {SEEK} WHERE name_key = @key;
        {rows.strip()}
    END TRY
    BEGIN CATCH
        SELECT @status = {ROW_FAILED}, @error = ERROR_NUMBER(), @message = ERROR_MESSAGE();
    END CATCH;
END;
"""


_RECORD: Final = recording(f"""
        SELECT @rest = SUBSTRING(@csv, 2, LEN(@csv)), @now = {NOW};
        WHILE LEN(@rest) > 1 AND @status = {DONE}
        BEGIN
            SET @slot = CAST(LEFT(@rest, CHARINDEX(N',', @rest) - 1) AS int);
            SET @rest = SUBSTRING(@rest, CHARINDEX(N',', @rest) + 1, LEN(@rest));
            {ROW}
        END;
""")

#: A writer is the head once nobody is before it among those who want its place either.
_ANSWER: Final = f"""
SELECT @status AS status, @csv AS slots, @tokens AS tokens, @declared AS declared, @n AS bound, @mark AS mark,
    @waited AS waited, CASE WHEN {holds("@gate")} AND (@place <> {WRITER} OR @mode <> 'Exclusive'
        OR {holds("CONCAT(@gate, N':u')")}) THEN 1 ELSE 0 END AS head, @error AS error, @message AS message;
"""

_WAITING: Final = "DECLARE @waited int = 0;"

_CLAIM: Final = ("stamp", "base", "gate", "mode", "place", "slots", "take", "fair", "start", "budget", "step")
HOLDER: Final = ("key", "kind", "lock_mode", "permit", "lease", "host", "pid", "thread", "label", "user", "process")
SESSION: Final = ("session_id", "session_us", "ticket", "waiting")

#: One that waits says that it still does.
_LIVES: Final = f"""
    IF @ticket <> N''
        UPDATE w SET expires_us = {NOW} + {PATIENCE_US}, waiting = @waiting
        FROM sqlsem_waiter AS w {SEEK_ROWS} WHERE ticket = @ticket;
"""
ALIVE: Final = SHOWN.format(text=_LIVES)
SERVED: Final = SHOWN.format(text=f" IF @ticket <> N'' AND @status = {DONE} {UNSTAND} ")

#: One wait of the server's own among those who want slots.
AT_GATE: Final = f"""IF @status = {DONE} AND NOT {holds("@gate")}
BEGIN
    {get("@gate", "Exclusive", "@patience")}
    SET @status = CASE WHEN @rc >= 0 THEN {DONE} WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    SET @waited = CASE WHEN @rc = 0 THEN 0 ELSE 1 END;
END;
"""
#: The slots are waited for with what patience is left.
FOR_SLOTS: Final = f"""IF @status = {DONE}
BEGIN
    SET @left = @patience - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
    SET @budget = CASE WHEN @left > @budget THEN @budget WHEN @left > 0 THEN @left ELSE 0 END;
    SET @began = SYSUTCDATETIME();
END;
"""

#: First come, first served: one wait of the server's own, and another one for a writer, among those who want its place.
#: Then the slots are waited for with what patience is left.
_STAND: Final = f"""
{AT_GATE}SET @resource = CONCAT(@gate, N':u');
IF @status = {DONE} AND @place = {WRITER} AND @mode = 'Exclusive' AND NOT {holds("@resource")}
BEGIN
    SET @left = @patience - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
    SET @left = CASE WHEN @left > @patience THEN @patience WHEN @left > 0 THEN @left ELSE 0 END;
    {get("@resource", "Exclusive", "@left")}
    SET @status = CASE WHEN @rc >= 0 THEN {DONE} WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    IF @rc <> 0 SET @waited = 1;
END;
{FOR_SLOTS}"""


#: The steps of a claim that is recorded, which the stored procedures share.
STEPS: Final = {
    "variables": _VARIABLES + _WAITING + RECORD_VARIABLES,
    "read": _READ,
    "take": sweep.QUEUE.replace("-- mark", sweep.MARK) + sweep.SWEEP.replace("-- shrink", sweep.SHRINK.strip()),
    "record": _RECORD,
    "end": sweep.END,
}


@functools.cache
def acquire(*, record: bool, in_line: bool = False) -> Batch:
    """Take ``take`` slots, all or nothing.

    ``fair``: not while the gate is taken. ``budget``: for how many milliseconds the batch may wait; only for a
    session that holds the gate and nothing else. ``in_line``: wait for the gate first, for ``patience`` milliseconds.
    """
    more = ("patience", *(("age",) if record else ())) if in_line else ()
    if not record:
        take = sweep.QUEUE.replace("-- mark", "") + sweep.SWEEP.replace("-- shrink", "")
        stand = _STAND if in_line else ""
        body = _VARIABLES + _WAITING + CHECK + stand + _READ_NOTHING + take + sweep.END
        return batch((*_CLAIM, *more), body + _ANSWER)
    step = STEPS
    stand = queue_up() + _STAND if in_line else ALIVE
    body = step["variables"] + CHECK + stand + step["read"] + step["take"] + step["record"] + SERVED + step["end"]
    return batch((*_CLAIM, *HOLDER, *SESSION, *more), body + _ANSWER)
