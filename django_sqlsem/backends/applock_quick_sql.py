"""The T-SQL of the usual case: one slot that is free, taken and given back by as few statements as it can be.

A server compiles the whole of a batch, so that what is rarely needed costs too. Whatever is not plain is left to the
batches of ``applock_acquire_sql``: these do nothing then, and say so.
"""

from __future__ import annotations

import functools

from django_sqlsem.backends.applock_sql import (
    BUSY,
    DONE,
    FREE,
    NOW,
    ROW_FAILED,
    Batch,
    batch,
    get,
    give,
    taken,
)

#: The row is written only if everything is plain: no operator's number, not paused, of this kind, a row there.
_WRITE = f"""
BEGIN TRY
    SET @now = {NOW};
    UPDATE s SET token = CASE WHEN s.token >= @now THEN s.token + 1 ELSE @now END, permit_id = @permit,
        acquired_us = @now, expires_us = @now + @lease, lease_us = @lease, host = @host, pid = @pid, thread = @thread,
        label = @label, user_name = @user, process_id = @process, session_id = @session_id, session_us = @session_us,
        suspect_us = NULL, lock_mode = N''
    FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key
    WHERE s.semaphore_key = @key AND s.slot = @slot AND m.kind = @kind AND m.paused = 0 AND m.operator_slots IS NULL
        AND (@slots >= @slot OR @slots = 0 AND m.declared_slots >= @slot);
    IF @@ROWCOUNT = 0 SET @status = {BUSY};
    ELSE
        SELECT @token = s.token, @declared = m.declared_slots
        FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key
        WHERE s.semaphore_key = @key AND s.slot = @slot;
END TRY
BEGIN CATCH
    SELECT @status = {ROW_FAILED};
END CATCH;
"""

#: The same as ``CHECK``, as part of a condition: a stamp has 56 characters.
_OURS = "CAST(CONTEXT_INFO() AS varchar(56)) = @stamp"

_HOLDER = ("key", "kind", "permit", "lease", "host", "pid", "thread", "label", "user", "process")


@functools.cache
def acquire(*, record: bool, reads: bool = False) -> Batch:
    """Take this very slot, if it is free and nobody waits, and no transaction is fenced with a permit of the name.

    ``reads``: nor does a reader wait to become the writer, which says so by ``:w``.
    """
    upgrades = f" AND NOT {taken('@told')}" if reads else ""
    more = (*_HOLDER, "session_id", "session_us") if record else ()
    row = _WRITE if record else ""
    declared = ", @token bigint = 0, @declared int = 0, @now bigint = 0" if record else ""
    result = "@token AS tokens, @declared AS declared" if record else "N'' AS tokens, @slots AS declared"
    return batch(
        ("stamp", "base", "gate", "mode", "resource", "fence", *(("told",) if reads else ()), "slot", "slots", *more),
        f"""
DECLARE @status int = {BUSY}, @rc int = -1, @done int{declared};
IF {_OURS} AND NOT {taken("@gate")}{upgrades}
BEGIN
    {get("@base", "@mode", "0")}
    IF @rc >= 0
    BEGIN
        {get("@resource", "Exclusive", "0")}
        IF @rc >= 0 AND NOT {taken("@fence")}
        BEGIN
            SET @status = {DONE};
            {row}
        END;
        IF @status <> {DONE}
        BEGIN
            IF @rc >= 0 {give("@resource")}
            {give("@base")}
        END;
    END;
END;
SELECT @status AS status, @slot AS slots, {result};
""",
        patient=record,
    )


@functools.cache
def release(*, record: bool) -> Batch:
    """Free one slot, the row before its lock. Error 1223 if it is not held."""
    row = f"BEGIN TRY {FREE} END TRY BEGIN CATCH SELECT @error = ERROR_NUMBER(), @message = ERROR_MESSAGE(); END CATCH;"
    extra = ", @rows int = 0, @error int = 0, @message nvarchar(2048) = N''" if record else ""
    return batch(
        ("base", "resource", *(("key", "slot", "permit") if record else ())),
        f"""
DECLARE @done int{extra};
{row if record else ""}
{give("@resource")}
{give("@base")}
SELECT 1 AS freed, {"@error AS error, @message AS message" if record else "0 AS error, N'' AS message"};
""",
        patient=record,
    )
