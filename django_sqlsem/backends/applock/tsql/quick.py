"""The T-SQL of the usual case: one slot that is free, taken and given back by as few statements as it can be.

A server compiles the whole of a batch, so that what is rarely needed costs too. Whatever is not plain is left to the
batches of ``applock_acquire_sql``: these do nothing then, and say so.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from django_sqlsem.backends.applock.tsql.parts import (
    BUSY,
    DONE,
    FREE,
    NOW,
    SEEK,
    SEEK_ROWS,
    Batch,
    available,
    batch,
    get,
    give,
    taken,
)

_ALONE: Final = "N'Exclusive'"

#: The row is written only if everything is plain: no operator's number, not paused, of this kind, a row there.
_WRITE: Final = f"""
IF @intent >= 0 AND @rc >= 0 AND {available("@fence", _ALONE)}
BEGIN
    BEGIN TRY
        SET @now = {NOW};
        UPDATE s SET token = CASE WHEN s.token >= @now THEN s.token + 1 ELSE @now END, permit_id = @permit,
            acquired_us = @now, expires_us = @now + @lease, lease_us = @lease, host = @host, pid = @pid,
            thread = @thread, label = @label, user_name = @user, process_id = @process, session_id = @session_id,
            session_us = @session_us, suspect_us = NULL, lock_mode = N''
        FROM sqlsem_slot AS s {SEEK_ROWS} JOIN sqlsem_semaphore AS m {SEEK} ON m.name_key = s.semaphore_key
        WHERE s.semaphore_key = @key AND s.slot = @slot AND m.kind = @kind AND m.paused = 0
            AND m.operator_slots IS NULL AND (@slots >= @slot OR @slots = 0 AND m.declared_slots >= @slot);
        IF @@ROWCOUNT = 1
            SELECT @token = s.token, @declared = m.declared_slots
            FROM sqlsem_slot AS s {SEEK} JOIN sqlsem_semaphore AS m {SEEK} ON m.name_key = s.semaphore_key
            WHERE s.semaphore_key = @key AND s.slot = @slot;
    END TRY
    BEGIN CATCH
        SET @token = 0;
    END CATCH;
END;
"""

_HOLDER: Final = (
    *("key", "kind", "slot", "slots", "permit", "lease", "host", "pid", "thread", "label", "user", "process"),
    *("session_id", "session_us"),
)


@functools.cache
def acquire(*, record: bool, reads: bool = False) -> Batch:
    """Take this very slot, if it is free and nobody waits, and no transaction is fenced with a permit of the name.

    ``reads``: nor does a reader wait to become the writer, which says so by ``:w``. The session's stamp is for the
    caller to compare, as ``found``.
    """
    upgrades = f" AND {available('@told', _ALONE)}" if reads else ""
    refused = "@token = 0" if record else f"@intent < 0 OR @rc < 0 OR {taken('@fence')}"
    declared = ", @token bigint = 0, @declared int = 0, @now bigint" if record else ""
    result = ", @token AS tokens, @declared AS declared" if record else ""
    return batch(
        ("base", "gate", "mode", "resource", "fence", *(("told",) if reads else ()), *(_HOLDER if record else ())),
        f"""
DECLARE @intent int = -1, @rc int = -1, @done int{declared};
IF {available("@gate", _ALONE)}{upgrades}
BEGIN
    {get("@base", "@mode", "0", "@intent")}
    {get("@resource", "Exclusive", "0")}
    {_WRITE.strip() if record else ""}
    IF {refused}
    BEGIN
        IF @rc >= 0 {give("@resource")}
        IF @intent >= 0 {give("@base")}
        SET @rc = -1;
    END;
END;
SELECT @rc AS rc, CONTEXT_INFO() AS found{result};
""",
        patient=record,
    )


def answer(row: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return what the batch that takes a slot has said, as the longer ones say it."""
    declared = row.get("declared", values["slots"])
    return {
        "status": DONE if row["rc"] >= 0 else BUSY,
        "slots": values["slot"],
        "tokens": row.get("tokens", ""),
        "declared": declared,
    }


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
