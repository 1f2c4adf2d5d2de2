"""The T-SQL of standing in line, and of stepping out of it: see ``applock_sql`` for what it is made of."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock_acquire_sql import PATIENCE_US
from django_sqlsem.backends.applock_sql import BUSY, CHECK, DONE, NOW, Batch, batch, get, give, holds

_QUEUE_UP: Final = f"""
IF @status = {DONE}
BEGIN
BEGIN TRY
    DELETE FROM sqlsem_waiter WHERE semaphore_key = @key AND expires_us < {NOW} - 60000000;
    UPDATE sqlsem_waiter SET expires_us = {NOW} + {PATIENCE_US}, waiting = @waiting WHERE ticket = @ticket;
    IF @@ROWCOUNT = 0
        INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, lease_us, away, waiting, host,
            pid, thread, label, user_name, process_id, boot_id, channel, beacon)
        VALUES (@ticket, @key, {NOW} - @age, {NOW} + {PATIENCE_US}, @take, @lease, 0, @waiting, @host,
            @pid, @thread, @label, @user, @process, N'', N'', 0);
END TRY
BEGIN CATCH SET @done = 0; END CATCH;
END;
"""


@functools.cache
def stand_in_line(*, record: bool) -> Batch:
    """Wait for the gate for ``patience`` milliseconds, in a wait of the server's own, first come first served."""
    names = ("key", "ticket", "waiting", "take", "lease", "age", "host", "pid", "thread", "label", "user", "process")
    return batch(
        ("stamp", "gate", "patience", *(names if record else ())),
        f"""
DECLARE @status int = {DONE}, @rc int = 0, @done int;
{CHECK}
{_QUEUE_UP if record else ""}
IF @status = {DONE} AND NOT {holds("@gate")}
BEGIN
    {get("@gate", "Exclusive", "@patience")}
    SET @status = CASE WHEN @rc >= 0 THEN {DONE} WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
END;
SELECT @status AS status;
""",
    )


@functools.cache
def step_out(*, record: bool) -> Batch:
    """Let the next in line go first."""
    return batch(
        ("stamp", "gate", *(("ticket",) if record else ())),
        f"""
DECLARE @status int = {DONE}, @done int = 0;
{CHECK}
IF @status = {DONE} AND {holds("@gate")}
BEGIN
    {give("@gate")}
END;
{"DELETE FROM sqlsem_waiter WHERE ticket = @ticket;" if record else ""}
SELECT @status AS status;
""",
    )


#: Take away the row of a waiter whose session has ended.
UNWAIT: Final = batch(
    ("ticket",),
    """
DELETE FROM sqlsem_waiter WHERE ticket = @ticket;
SELECT @@ROWCOUNT AS freed;
""",
)
