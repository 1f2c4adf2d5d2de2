"""The T-SQL that takes slots, at once or after standing in line: see ``applock_sql`` for what it is made of."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock_line_sql import PATIENCE_US, QUEUE_UP, SHOWN
from django_sqlsem.backends.applock_sql import (
    BUSY,
    CHECK,
    DONE,
    GATED,
    KIND,
    NEVER,
    NEW,
    NOW,
    OWN,
    PAUSED,
    ROW_FAILED,
    Batch,
    available,
    batch,
    get,
    give,
    holds,
    taken,
)

#: A waiting head's first and longest wait for one slot before it looks at the others, in milliseconds.
FIRST_STEP_MS: Final = 2
LAST_STEP_MS: Final = 32
#: Semaphores of so many slots at the most are swept from the first one on; larger ones from a random one.
FEW: Final = 16

_VARIABLES: Final = f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int = 0, @n int = @slots, @count int = 0, @declared int = @slots,
    @i int = 0, @m int = 0, @slot int = 0, @last int = 0, @left int = 0, @intent int = 0, @shrinking int = 0,
    @busy int = 0, @mark bigint = 0, @error int = 0, @message nvarchar(2048) = N'', @tokens nvarchar(max) = N'',
    @csv nvarchar(max) = N',', @resource nvarchar(255) = N'', @rest nvarchar(max) = N'',
    @began datetime2(3) = SYSUTCDATETIME();
"""

_RECORD_VARIABLES: Final = """
DECLARE @operator int, @paused bit = 0, @seen nvarchar(16), @top int, @token bigint = 0, @now bigint = 0;
"""

#: What the rows say of the name.
_READ: Final = f"""
IF @status = {DONE}
BEGIN
    SELECT @declared = declared_slots, @operator = operator_slots, @paused = paused, @seen = kind
    FROM sqlsem_semaphore WHERE name_key = @key;
    SELECT @top = MAX(slot) FROM sqlsem_slot WHERE semaphore_key = @key;
    SET @n = CASE WHEN @operator IS NOT NULL THEN @operator WHEN @slots > 0 THEN @slots ELSE @declared END;
    SET @status = CASE
        WHEN @seen IS NULL THEN {NEW}
        WHEN @seen <> @kind THEN {KIND}
        WHEN @take > @n THEN {NEVER}
        WHEN @top IS NULL OR @top < @n THEN {NEW}
        WHEN @paused = 1 THEN {PAUSED}
        ELSE {DONE} END;
    IF @status = {KIND} SET @message = @seen;
END;
"""

_READ_NOTHING: Final = f"""
IF @n < 1 SET @n = 1;
IF @status = {DONE} AND @take > @n SET @status = {NEVER};
"""

#: Others wait: is a slot free all the same? Then the mark tells, at the next look, whether anything moved in between.
#: One that barges yields to a head that wants all slots (``:w``), as that would never see them free at once.
_QUEUE: Final = f"""
IF @status = {DONE} AND {holds("@base")} SET @status = {OWN};
SET @resource = CONCAT(@gate, N':w');
IF @status = {DONE} AND (@fair = 1 AND {taken("@gate")}
    OR @fair = 0 AND NOT {holds("@gate")} AND {taken("@resource")})
BEGIN
    SELECT @status = {BUSY}, @i = CASE WHEN {available("@base", "@mode")} THEN 1 ELSE @n + 1 END;
    WHILE @i <= @n AND @status = {BUSY}
    BEGIN
        SET @resource = CONCAT(@i, N'-', @base);
        IF NOT {taken("@resource")} SET @status = {GATED};
        SET @i = @i + 1;
    END;
    -- mark
END;
"""

_MARK: Final = "SELECT @mark = MAX(token) FROM sqlsem_slot WHERE semaphore_key = @key;"

#: After an operator's shrink nothing is granted until fewer are held than there are slots; one caller at a time counts.
_SHRINK: Final = f"""
    IF @status = {DONE} AND @place < 0 AND @operator IS NOT NULL AND @top > @n
    BEGIN
        SET @i = @n + 1;
        WHILE @i <= @top
        BEGIN
            SET @resource = CONCAT(@i, N'-', @base);
            IF {taken("@resource")} SET @busy = @busy + 1;
            SET @i = @i + 1;
        END;
        IF @busy > 0
        BEGIN
            SET @resource = CONCAT(@gate, N':s');
            {get("@resource", "Exclusive", "0")}
            IF @rc >= 0 SET @shrinking = 1; ELSE SET @status = {BUSY};
            SET @i = 1;
            WHILE @i <= @n AND @status = {DONE}
            BEGIN
                SET @resource = CONCAT(@i, N'-', @base);
                IF {taken("@resource")} SET @busy = @busy + 1;
                SET @i = @i + 1;
            END;
            IF @busy + @take > @n SET @status = {BUSY};
            SET @budget = 0;
        END;
    END;
"""

#: Try every slot without waiting, from a random one on; then wait for one of them for a moment, and so on. ``place``:
#: the only slot that is tried, for who has the name itself alone; as the head it says so, by ``:w``.
_SWEEP: Final = f"""
IF @status = {DONE}
BEGIN
    SET @resource = CONCAT(@gate, N':w');
    IF @place >= 0 AND {holds("@gate")} AND NOT {holds("@resource")}
    BEGIN
        {get("@resource", "Exclusive", "0")}
    END;
    {get("@base", "@mode", "@budget")}
    IF @rc >= 0 SET @intent = 1; ELSE SET @status = CASE WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    IF @rc = 1 SET @waited = 1;
    IF @n <= {FEW} SET @start = 0;
    SET @m = CASE WHEN @place < 0 THEN @n ELSE 1 END;
    -- shrink
    WHILE @status = {DONE} AND @count < @take
    BEGIN
        SELECT @i = 0, @last = 0;
        WHILE @i < @m AND @count < @take AND @status = {DONE}
        BEGIN
            SET @slot = CASE WHEN @place < 0 THEN (@start + @i) % @m + 1 ELSE @place END;
            IF CHARINDEX(CONCAT(N',', @slot, N','), @csv) = 0
            BEGIN
                SET @resource = CONCAT(@slot, N'-', @base);
                {get("@resource", "Exclusive", "0")}
                IF @rc >= 0 SELECT @csv = CONCAT(@csv, @slot, N','), @count = @count + 1;
                ELSE IF @rc = -1 SET @last = @slot + 1;
                ELSE SET @status = @rc;
            END;
            SET @i = @i + 1;
        END;
        IF @count < @take AND @status = {DONE}
        BEGIN
            -- Each turn costs a millisecond at least, also if the clock is set back meanwhile.
            SET @budget = @budget - 1;
            SET @left = @budget - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
            IF @left > @budget SET @left = @budget;
            IF @left <= 0 OR @last = 0
                SET @status = {BUSY};
            ELSE
            BEGIN
                IF @m > 1 AND @left > @step SET @left = @step;
                SET @resource = CONCAT(@last - 1, N'-', @base);
                {get("@resource", "Exclusive", "@left")}
                IF @rc >= 0 SELECT @csv = CONCAT(@csv, @last - 1, N','), @count = @count + 1, @waited = 1;
                ELSE IF @rc <> -1 SET @status = @rc;
                SELECT @start = @start + 1, @step = CASE WHEN @step * 2 < {LAST_STEP_MS} THEN @step * 2
                    ELSE {LAST_STEP_MS} END;
            END;
        END;
    END;
END;
"""

#: The row beside each lock. Its lock is ours, so that nobody else writes it. An operator may have acted meanwhile.
_RECORD: Final = f"""
IF @status = {DONE}
BEGIN
    BEGIN TRY
        IF @waited = 1
            SELECT @status = CASE WHEN paused = 1 THEN {PAUSED}
                WHEN COALESCE(operator_slots, 0) <> COALESCE(@operator, 0) THEN {BUSY} ELSE @status END
            FROM sqlsem_semaphore WHERE name_key = @key;
        SELECT @rest = SUBSTRING(@csv, 2, LEN(@csv)), @now = {NOW};
        WHILE LEN(@rest) > 1 AND @status = {DONE}
        BEGIN
            SET @slot = CAST(LEFT(@rest, CHARINDEX(N',', @rest) - 1) AS int);
            SET @rest = SUBSTRING(@rest, CHARINDEX(N',', @rest) + 1, LEN(@rest));
            SELECT @token = token FROM sqlsem_slot WHERE semaphore_key = @key AND slot = @slot;
            IF @@ROWCOUNT = 0 SET @status = {NEW};
            SET @token = CASE WHEN @token >= @now THEN @token + 1 ELSE @now END;
            UPDATE sqlsem_slot SET token = @token, permit_id = @permit, acquired_us = @now, expires_us = @now + @lease,
                lease_us = @lease, host = @host, pid = @pid, thread = @thread, label = @label, user_name = @user,
                process_id = @process, session_id = @session_id, session_us = @session_us, suspect_us = NULL,
                lock_mode = @lock_mode
            WHERE semaphore_key = @key AND slot = @slot;
            SET @tokens = CONCAT(@tokens, @token, N',');
        END;
    END TRY
    BEGIN CATCH
        SELECT @status = {ROW_FAILED}, @error = ERROR_NUMBER(), @message = ERROR_MESSAGE();
    END CATCH;
END;
"""

#: All or nothing: what was got goes back unless everything was; and the gate opens for the next in line if it was.
_END: Final = f"""
IF @status <> {DONE} AND @intent = 1
BEGIN
    SET @rest = SUBSTRING(@csv, 2, LEN(@csv));
    WHILE CHARINDEX(N',', @rest) > 0
    BEGIN
        SET @resource = CONCAT(LEFT(@rest, CHARINDEX(N',', @rest) - 1), N'-', @base);
        SET @rest = SUBSTRING(@rest, CHARINDEX(N',', @rest) + 1, LEN(@rest));
        {give("@resource")}
    END;
    {give("@base")}
END;
IF @shrinking = 1
BEGIN
    SET @resource = CONCAT(@gate, N':s');
    {give("@resource")}
END;
SET @resource = CONCAT(@gate, N':w');
IF (@status = {DONE} OR @place < 0) AND {holds("@resource")}
BEGIN
    {give("@resource")}
END;
IF @status = {DONE} AND {holds("@gate")}
BEGIN
    {give("@gate")}
END;
"""
_ANSWER: Final = f"""
SELECT @status AS status, @csv AS slots, @tokens AS tokens, @declared AS declared, @n AS bound, @mark AS mark,
    @waited AS waited, CASE WHEN {holds("@gate")} THEN 1 ELSE 0 END AS head, @error AS error, @message AS message;
"""

_WAITING: Final = "DECLARE @waited int = 0;"

_CLAIM: Final = ("stamp", "base", "gate", "mode", "place", "slots", "take", "fair", "start", "budget", "step")
_HOLDER: Final = ("key", "kind", "lock_mode", "permit", "lease", "host", "pid", "thread", "label", "user", "process")
_SESSION: Final = ("session_id", "session_us", "ticket", "waiting")

#: One that waits says that it still does.
_LIVES: Final = f"""
    IF @ticket <> N''
        UPDATE sqlsem_waiter SET expires_us = {NOW} + {PATIENCE_US}, waiting = @waiting WHERE ticket = @ticket;
"""
_ALIVE: Final = SHOWN.format(text=_LIVES)
_SERVED: Final = SHOWN.format(
    text=f" IF @ticket <> N'' AND @status = {DONE} DELETE FROM sqlsem_waiter WHERE ticket = @ticket; "
)

#: First come, first served: one wait of the server's own. Then the slots are waited for with what patience is left.
_STAND: Final = f"""
IF @status = {DONE} AND NOT {holds("@gate")}
BEGIN
    {get("@gate", "Exclusive", "@patience")}
    SET @status = CASE WHEN @rc >= 0 THEN {DONE} WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    SET @waited = CASE WHEN @rc = 0 THEN 0 ELSE 1 END;
    SET @left = @patience - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
    SET @budget = CASE WHEN @left > @budget THEN @budget WHEN @left > 0 THEN @left ELSE 0 END;
    SET @began = SYSUTCDATETIME();
END;
"""


#: The steps of a claim that is recorded, which the stored procedures share.
STEPS: Final = {
    "variables": _VARIABLES + _WAITING + _RECORD_VARIABLES,
    "read": _READ,
    "take": _QUEUE.replace("-- mark", _MARK) + _SWEEP.replace("-- shrink", _SHRINK.strip()),
    "record": _RECORD,
    "end": _END,
}


@functools.cache
def acquire(*, record: bool, in_line: bool = False) -> Batch:
    """Take ``take`` slots, all or nothing.

    ``fair``: not while the gate is taken. ``budget``: for how many milliseconds the batch may wait; only for a
    session that holds the gate and nothing else. ``in_line``: wait for the gate first, for ``patience`` milliseconds.
    """
    more = ("patience", *(("age",) if record else ())) if in_line else ()
    if not record:
        sweep, queue = _SWEEP.replace("-- shrink", ""), _QUEUE.replace("-- mark", "")
        stand = _STAND if in_line else ""
        body = _VARIABLES + _WAITING + CHECK + stand + _READ_NOTHING + queue + sweep + _END
        return batch((*_CLAIM, *more), body + _ANSWER)
    step = STEPS
    stand = QUEUE_UP + _STAND if in_line else _ALIVE
    body = step["variables"] + CHECK + stand + step["read"] + step["take"] + step["record"] + _SERVED + step["end"]
    return batch((*_CLAIM, *_HOLDER, *_SESSION, *more), body + _ANSWER)
