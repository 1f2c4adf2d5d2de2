"""The T-SQL of a claim for one slot of a semaphore that no operator has made smaller: half as long as the one for all.

It does what ``applock_acquire_sql`` does, in the same order, without what only reader-writer locks, claims for several
slots and operators' numbers need. A server compiles the whole of a batch, and some parse it anew for each call.
"""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock.tsql import acquire as tsql_acquire
from django_sqlsem.backends.applock.tsql import sweep
from django_sqlsem.backends.applock.tsql.fences import OF_GATE, behind
from django_sqlsem.backends.applock.tsql.line import queue_up
from django_sqlsem.backends.applock.tsql.parts import (
    BUSY,
    CHECK,
    DONE,
    GATED,
    KIND,
    NEW,
    NOW,
    ODD,
    PAUSED,
    Batch,
    available,
    batch,
    get,
    give,
    holds,
    taken,
)
from django_sqlsem.database.sqlserver import OF_SLOTS, OWN

_VARIABLES: Final = f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int = 0, @n int = @slots, @declared int = @slots, @i int = 0,
    @slot int = 0, @ms int = 0, @left int = 0, @intent int = -1, @got int = 0, @mark bigint = 0, @error int = 0,
    @message nvarchar(2048) = N'', @tokens nvarchar(60) = N'', @resource nvarchar(255) = N'', @waited int = 0,
    @fence nvarchar(60) = {OF_GATE}, @post nvarchar(255) = N'', @began datetime2(3) = SYSUTCDATETIME();
"""

_READ: Final = f"""
IF @status = {DONE}
BEGIN
    {tsql_acquire.COUNT}
    SET @status = CASE
        WHEN @seen IS NULL THEN {NEW}
        WHEN @seen <> @kind THEN {KIND}
        WHEN @top IS NULL OR @top < @n THEN {NEW}
        WHEN @paused = 1 THEN {PAUSED}
        WHEN @operator IS NOT NULL AND @top > @n THEN {ODD}
        ELSE {DONE} END;
    IF @status = {KIND} SET @message = @seen;
END;
"""

_READ_NOTHING: Final = "IF @n < 1 SET @n = 1;\n"

#: First come, first served.
_STAND: Final = tsql_acquire.AT_GATE + tsql_acquire.FOR_SLOTS

#: Re-entrant locks would hand the same slot out twice.
_OWN: Final = f"IF @status = {DONE} AND {holds('@base')} SET @status = {OWN};\n"

#: Others wait: is a slot free all the same? One that barges yields to a head that wants all slots only (``:w``).
_YIELD: Final = f"""
SET @resource = CONCAT(@gate, N':w');
IF @status = {DONE} AND (@fair = 1 AND {taken("@gate")}
    OR @fair = 0 AND NOT {holds("@gate")} AND {taken("@resource")})
BEGIN
    SELECT @status = {BUSY}, @i = CASE WHEN {available("@base", f"N'{OF_SLOTS}'")} THEN 1 ELSE @n + 1 END;
    WHILE @i <= @n AND @status = {BUSY}
    BEGIN
        SET @resource = CONCAT(@i, N'-', @base);
        IF NOT {taken("@resource")} SET @status = {GATED};
        SET @i = @i + 1;
    END;
    -- mark
END;
"""

#: A round that looks at every slot without waiting, then one wait for one of them for a moment, and so on.
_SWEEP: Final = f"""
IF @status = {DONE}
BEGIN
    {get("@base", OF_SLOTS, "@budget", "@intent")}
    IF @intent < 0 SET @status = CASE WHEN @intent = -1 THEN {BUSY} ELSE @intent END;
    IF @intent = 1 SET @waited = 1;
    IF @n <= {sweep.FEW} SET @start = 0;
END;
WHILE @status = {DONE} AND @got = 0
BEGIN
    IF @i < @n SELECT @ms = 0, @slot = (@start + @i) % @n + 1;
    ELSE
    BEGIN
        {sweep.LEFT}
        SET @ms = CASE WHEN @n > 1 AND @left > @step THEN @step ELSE @left END;
        IF @left <= 0 SET @status = {BUSY};
        SELECT @i = -1, @start = @start + 1,
            @step = CASE WHEN @step * 2 < {sweep.LAST_STEP_MS} THEN @step * 2 ELSE {sweep.LAST_STEP_MS} END;
    END;
    IF @status = {DONE}
    BEGIN
        SET @resource = CONCAT(@slot, N'-', @base);
        {get("@resource", "Exclusive", "@ms")}
        {behind("@ms", shared=True)}
        IF @rc >= 0 SET @got = 1;
        ELSE IF @rc <> -1 SET @status = @rc;
        IF @rc >= 0 AND @ms > 0 SET @waited = 1;
        SET @i = @i + 1;
    END;
END;
"""

_RECORD: Final = tsql_acquire.recording(f"""
IF @status = {DONE}
BEGIN
    SET @now = {NOW};
    {tsql_acquire.ROW}
END;
""")

#: Nothing stays of a claim that was not granted; and the gate opens for the next in line if it was.
_END: Final = f"""
IF @status <> {DONE}
BEGIN
    SET @resource = CONCAT(@slot, N'-', @base);
    IF @got = 1
    BEGIN
        {give("@resource")}
    END;
    IF @intent >= 0
    BEGIN
        {give("@base")}
    END;
END;
SET @resource = CONCAT(@gate, N':w');
IF {holds("@resource")}
BEGIN
    {give("@resource")}
END;
{sweep.OPEN}"""

_ANSWER: Final = f"""
SELECT @status AS status, @slot AS slots, @tokens AS tokens, @declared AS declared, @n AS bound, @mark AS mark,
    @waited AS waited, CASE WHEN {holds("@gate")} THEN 1 ELSE 0 END AS head, @error AS error, @message AS message;
"""


@functools.cache
def acquire(*, record: bool, in_line: bool = False) -> Batch:
    """Take one slot, as ``applock_acquire_sql.acquire`` does; or nothing, and say ``ODD``, as it is not so simple."""
    claim: tuple[str, ...] = ("stamp", "base", "gate", "slots", "start", "budget", "step")
    claim += ("patience",) if in_line else ("fair",)
    order = _STAND if in_line else _YIELD.replace("-- mark", sweep.MARK if record else "")
    if not record:
        before = _READ_NOTHING + (order + _OWN if in_line else _OWN + order)
        return batch(claim, _VARIABLES + CHECK + before + _SWEEP + _END + _ANSWER)
    claim += (*tsql_acquire.HOLDER, *tsql_acquire.SESSION, *(("age",) if in_line else ()))
    before = queue_up("1") + order + _READ + _OWN if in_line else tsql_acquire.ALIVE + _READ + _OWN + order
    body = _VARIABLES + tsql_acquire.RECORD_VARIABLES + CHECK + before + _SWEEP + _RECORD + tsql_acquire.SERVED + _END
    return batch(claim, body + _ANSWER)
