"""The T-SQL of a place in line: its row, and stepping out of it. See ``applock_sql`` for what it is made of."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock.tsql.parts import CHECK, DONE, NOW, SEEK_ROWS, Batch, batch, stepping_out
from django_sqlsem.core.modes import WHOLE

#: A waiter's row lasts so long, in microseconds, unless its process says that it lives.
PATIENCE_US: Final = 2_500_000

#: A waiter's row is for people to see: whatever is wrong with it must not cost a grant.
SHOWN: Final = "BEGIN TRY {text} END TRY BEGIN CATCH SET @done = 0; END CATCH;"

#: Nobody waits under this ticket any more.
UNSTAND: Final = f"DELETE w FROM sqlsem_waiter AS w {SEEK_ROWS} WHERE ticket = @ticket;"

#: Who wants all slots has 0 in its row.
_WANTED: Final = f"CASE WHEN @lock_mode = N'{WHOLE}' THEN 0 ELSE @take END"


def _row(wanted: str) -> str:
    return f"""
    DELETE w FROM sqlsem_waiter AS w {SEEK_ROWS} WHERE semaphore_key = @key AND expires_us < {NOW} - 60000000;
    UPDATE w SET expires_us = {NOW} + {PATIENCE_US}, waiting = @waiting, lock_mode = @lock_mode,
        take = {wanted}, thread = @thread, label = @label, user_name = @user
    FROM sqlsem_waiter AS w {SEEK_ROWS} WHERE ticket = @ticket;
    IF @@ROWCOUNT = 0
        INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, lease_us, away, waiting, host,
            pid, thread, label, user_name, process_id, boot_id, channel, beacon, lock_mode)
        VALUES (@ticket, @key, {NOW} - @age, {NOW} + {PATIENCE_US}, {wanted}, @lease, 0, @waiting, @host,
            @pid, @thread, @label, @user, @process, N'', N'', 0, @lock_mode);
"""


def queue_up(wanted: str = _WANTED) -> str:
    """Return what writes the row of one that stands in line for so many slots."""
    return f"IF @status = {DONE}\nBEGIN\n{SHOWN.format(text=_row(wanted))}\nEND;\n"


@functools.cache
def step_out(*, record: bool) -> Batch:
    """Let the next in line go first."""
    return batch(
        ("stamp", "gate", *(("ticket",) if record else ())),
        f"""
DECLARE @status int = {DONE}, @done int = 0, @resource nvarchar(255) = N'';
{CHECK}
{stepping_out()}{UNSTAND if record else ""}
SELECT @status AS status;
""",
    )


#: Take away the row of a waiter whose session has ended.
UNWAIT: Final = batch(
    ("ticket",),
    f"""
{UNSTAND}
SELECT @@ROWCOUNT AS freed;
""",
)

#: Whoever waits next in the same process gets what was granted to one that has given up meanwhile.
RENAME: Final = batch(
    ("key", "before", "permit", "lease", "thread", "label", "user"),
    f"""
UPDATE s SET permit_id = @permit, lease_us = @lease, thread = @thread, label = @label, user_name = @user,
    stop_token = NULL
FROM sqlsem_slot AS s {SEEK_ROWS} WHERE semaphore_key = @key AND permit_id = @before;
SELECT @@ROWCOUNT AS renamed;
""",
)
