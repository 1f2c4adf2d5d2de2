"""The stored procedure ``sqlsem.acquire``: how a program without Django waits, on the one session that it has.

It stands at the gate in one long lock wait, which keeps its place. A session that waits sees nothing, though: if the
first in line is a process that has stopped, somebody must look whether a slot is free all the same. So the wait is cut
after ``FIRST_STAND_MS``, and then whenever it has lasted as long again as all before: the place is lost then, but so
seldom that nobody starves. Two looks that find a free slot behind a gate where nothing moves prove that its holder has
stopped; from then on there is no order to keep, and the slots are tried every ``STUCK_MS``.
"""

from __future__ import annotations

import re
from typing import Final

from django_sqlsem.backends import applock_acquire_sql as acquiring
from django_sqlsem.backends import applock_sql as sql
from django_sqlsem.naming import MAX_SLOTS

#: How long one waits by default. Below the 30 seconds after which .NET cancels a command.
TIMEOUT_MS: Final = 25_000
#: The first wait at the gate, in milliseconds.
FIRST_STAND_MS: Final = 5_000
#: So far apart are two looks at a gate that seems stuck, in milliseconds: for a newcomer, which loses its place by the
#: second one, and for anybody else, who has lost it already. Later tries follow every ``STUCK_MS``.
FIRST_LOOK_MS: Final = 1_000
LOOK_MS: Final = 200
STUCK_MS: Final = 250
#: The first in line reads the rows anew so often, in milliseconds.
BUDGET_MS: Final = 500
#: Where there is nothing to wait for: while an operator's shrink lasts, in milliseconds.
PAUSE_MS: Final = 100
#: A row's not-null marker, in microseconds: nothing runs out here.
LEASE_US: Final = 60_000_000

#: Numbers of the errors that are thrown. They stay as they are: programs rely on them.
ERRORS: Final = {"argument": 59301, "kind": 59302, "held": 59303, "tables": 59304, "failed": 59305}

#: What ``acquire`` returns beside the return codes of sp_getapplock.
PAUSED: Final = -4


def throw(error: str, message: str) -> str:
    """Return the statement; ``message`` is plain text, or a variable."""
    text = message if re.fullmatch(r"@\w+", message) else "N'" + message.replace("'", "''") + "'"
    return f"THROW {ERRORS[error]}, {text}, 1;"


#: The end of a procedure's CATCH.
RETHROW: Final = (
    "IF ERROR_NUMBER() IN (207, 208) "
    + throw("tables", "The tables of django_sqlsem are not in this database: run manage.py migrate on it.")
    + "\n    THROW;"
)

PARAMETERS: Final = f"""
    @name nvarchar(4000),
    @slots int = NULL,
    @timeout_ms int = {TIMEOUT_MS},
    @label nvarchar(4000) = NULL,
    @slot int = NULL OUTPUT,
    @token bigint = NULL OUTPUT,
    @waited_ms int = NULL OUTPUT
"""

_VARIABLES: Final = """
SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DECLARE @record bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END, @began datetime2(3) = SYSUTCDATETIME(),
    @asked datetime2(3), @base nvarchar(255), @gate nvarchar(255), @key nvarchar(32), @resource nvarchar(255),
    @kind nvarchar(16) = N'semaphore', @permit nvarchar(32), @host nvarchar(255), @pid bigint, @thread nvarchar(100),
    @work nvarchar(200), @user nvarchar(150), @session_us bigint, @wanted int, @start int, @left bigint, @patience int,
    @entered int = 0, @waited int = 0, @head int = 0, @fair int = 1, @budget int = 0, @looks int = 0, @stuck int = 0,
    @news int = 0, @i int, @rc int, @done int, @result int, @answer int, @got int, @number bigint, @seen_mark bigint,
    @first_mark bigint, @last_mark bigint, @limit int = 0, @blocked int, @fault int, @why nvarchar(2048);
SELECT @slot = NULL, @token = NULL, @waited_ms = 0;
"""

_ENTER: Final = f"""
    EXEC sqlsem.internal_names @name = @name, @base = @base OUTPUT, @gate = @gate OUTPUT, @key = @key OUTPUT;
    IF @slots < 1 OR @slots > {MAX_SLOTS}
        {throw("argument", f"@slots must be from 1 to {MAX_SLOTS}, or NULL: as declared elsewhere, else 1.")}
    IF @timeout_ms < 0
        {throw("argument", "@timeout_ms must be 0 or more, or NULL: wait for ever.")}
    -- A call that its client cut short may have left the gate closed.
    IF {sql.holds("@gate")}
    BEGIN
        {sql.give("@gate")}
    END;
    IF {sql.holds("@base")}
        {throw("held", "You have acquired this semaphore already, in this very session.")}
    SELECT @entered = 1, @wanted = COALESCE(@slots, 0), @host = LEFT(COALESCE(HOST_NAME(), N''), 255), @pid = 0,
        @thread = CONCAT(N'session ', @@SPID), @work = LEFT(COALESCE(@label, APP_NAME(), N''), 200),
        @user = LEFT(COALESCE(ORIGINAL_LOGIN(), N''), 150),
        @permit = LOWER(REPLACE(CONVERT(varchar(36), NEWID()), '-', ''));
    SELECT @pid = COALESCE(host_process_id, 0), @session_us = {sql.LOGIN_US} FROM sys.dm_exec_sessions
    WHERE session_id = @@SPID;
"""

_ASK: Final = f"""
        SELECT @asked = SYSUTCDATETIME(), @start = CAST(RAND() * {MAX_SLOTS} AS int), @answer = {sql.BUSY};
        SET @left = CASE WHEN @timeout_ms IS NULL THEN 2147483647
            ELSE @timeout_ms - DATEDIFF_BIG(MILLISECOND, @began, @asked) END;
        SET @budget = CASE WHEN @head = 0 OR @left <= 0 THEN 0 WHEN @left < {BUDGET_MS} THEN @left ELSE {BUDGET_MS} END;
        SET @fair = CASE WHEN @head = 1 THEN 0 WHEN @stuck = 1 THEN 2 ELSE 1 END;
        EXEC sqlsem.internal_claim @base = @base, @gate = @gate, @slots = @wanted, @take = 1, @fair = @fair,
            @start = @start, @budget = @budget, @step = {acquiring.FIRST_STEP_MS}, @key = @key, @kind = @kind,
            @permit = @permit, @lease = {LEASE_US}, @host = @host, @pid = @pid, @thread = @thread, @label = @work,
            @user = @user, @process = N'', @session_id = @@SPID, @session_us = @session_us, @record = @record,
            @answer = @answer OUTPUT, @got = @got OUTPUT, @number = @number OUTPUT, @seen_mark = @seen_mark OUTPUT,
            @limit = @limit OUTPUT, @blocked = @blocked OUTPUT, @fault = @fault OUTPUT, @why = @why OUTPUT;
        SET @left = CASE WHEN @timeout_ms IS NULL THEN 2147483647
            ELSE @timeout_ms - DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME()) END;
        IF @blocked = 1 SET @waited = 1;
"""

_JUDGE: Final = f"""
        IF @answer = {sql.DONE}
            SELECT @slot = @got, @token = @number, @result = CASE WHEN @waited = 1 THEN 1 ELSE 0 END
        ELSE IF @answer = {sql.NEW} AND @news < 5
        BEGIN
            SET @news = @news + 1;
            SET @limit = CASE WHEN @limit < 1 THEN 1 ELSE @limit END;
            EXEC sqlsem.internal_create @key = @key, @name = @name, @kind = @kind, @slots = @limit;
        END
        ELSE IF @answer = {sql.KIND} AND @why = N'mutex' AND @kind <> @why AND COALESCE(@slots, 1) = 1
            SET @kind = N'mutex';
        ELSE IF @answer = {sql.KIND}
        BEGIN
            SET @why = CONCAT(N'The name belongs to a lock of another kind, ', @why, N': it is no semaphore of ',
                COALESCE(@slots, 1), N' slots.');
            {throw("kind", "@why")}
        END
        ELSE IF @answer = {sql.PAUSED}
            SET @result = {PAUSED};
        ELSE IF @answer IN (-1, -2, -3)
            SET @result = @answer;
        ELSE IF @answer = {sql.ROW_FAILED} AND @fault IN (1205, 1222, 3960) AND @left > 0
            SET @waited = 1;
        ELSE IF @answer NOT IN ({sql.BUSY}, {sql.GATED})
        BEGIN
            SET @why = CONCAT(N'The semaphore could not be acquired (', @answer, N'). ', @why);
            {throw("failed", "@why")}
        END
        ELSE IF @left <= 0
        BEGIN
            -- The last look: if nothing was granted during the whole wait, nobody is served by that gate.
            IF @answer = {sql.GATED} AND @waited = 1 AND @seen_mark = @first_mark
                SET @stuck = 1;
            ELSE
                SET @result = -1;
        END
"""

_PAUSE: Final = f"""
        ELSE IF @head = 1
        BEGIN
            SET @waited = 1;
            IF DATEDIFF_BIG(MILLISECOND, @asked, SYSUTCDATETIME()) < {BUDGET_MS} / 2
            BEGIN
                {sql.get("@base", "IntentExclusive", str(PAUSE_MS))}
                IF @rc >= 0
                BEGIN
                    {sql.give("@base")}
                    SELECT @i = 1, @resource = CONCAT(N'1-', @base);
                    WHILE @i < {MAX_SLOTS} AND NOT {sql.taken("@resource")}
                    BEGIN
                        SET @i = @i + 1;
                        SET @resource = CONCAT(@i, N'-', @base);
                    END;
                    {sql.get("@resource", "Exclusive", str(PAUSE_MS))}
                    IF @rc >= 0
                    BEGIN
                        {sql.give("@resource")}
                    END;
                END;
                IF @rc = -3 SET @result = @rc;
            END;
        END
"""

_STAND: Final = f"""
        ELSE
        BEGIN
            SET @first_mark = COALESCE(@first_mark, NULLIF(@seen_mark, 0));
            IF @stuck = 1
                SET @patience = {STUCK_MS};
            ELSE IF @answer = {sql.BUSY}
                SELECT @looks = 0, @patience = CASE WHEN DATEDIFF_BIG(MILLISECOND, @began, @asked) > {FIRST_STAND_MS}
                    THEN CASE WHEN DATEDIFF_BIG(MILLISECOND, @began, @asked) < 1000000000
                        THEN DATEDIFF_BIG(MILLISECOND, @began, @asked) ELSE 1000000000 END ELSE {FIRST_STAND_MS} END
            ELSE IF @looks > 0 AND @seen_mark = @last_mark
                SELECT @stuck = 1, @patience = 0;
            ELSE
                SELECT @looks = 1, @last_mark = @seen_mark,
                    @patience = CASE WHEN @waited = 0 THEN {FIRST_LOOK_MS} ELSE {LOOK_MS} END;
            SET @waited = 1;
            IF @patience > @left SET @patience = @left;
            {sql.get("@gate", "Exclusive", "@patience")}
            IF @rc >= 0 SELECT @head = 1, @stuck = 0;
            ELSE IF @rc IN (-2, -3) SET @result = @rc;
            ELSE IF @rc <> -1
            BEGIN
                SET @why = CONCAT(N'The server refused to queue the session (', @rc, N').');
                {throw("failed", "@why")}
            END;
        END;
"""

BODY: Final = f"""{_VARIABLES}
BEGIN TRY
{_ENTER}
    WHILE @result IS NULL
    BEGIN
{_ASK}{_JUDGE}{_PAUSE}{_STAND}
    END;
    IF {sql.holds("@gate")}
    BEGIN
        {sql.give("@gate")}
    END;
END TRY
BEGIN CATCH
    IF @entered = 1
    BEGIN
        SET @limit = CASE WHEN @limit > 0 THEN @limit ELSE {MAX_SLOTS} END;
        EXEC sqlsem.internal_clean @base = @base, @gate = @gate, @bound = @limit;
    END;
    {RETHROW}
END CATCH;
SET @left = DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME());
SET @waited_ms = CASE WHEN @waited = 0 THEN 0 WHEN @left > 2147483647 THEN 2147483647 ELSE @left END;
RETURN @result;
"""
