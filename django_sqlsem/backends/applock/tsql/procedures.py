"""The stored procedures for programs without Django, made of the text that the backend itself runs.

``acquire``, ``release`` and ``status`` are an interface that stays (docs/backends/tsql.md); those that begin with
``internal_`` are not. Whatever reads a table is called, not written into ``acquire``: a table that is missing ends the
procedure that names it, and only its caller can catch that.

The stored procedure ``sqlsem.acquire``: how a program without Django waits, on the one session that it has.

It stands at the gate in one long lock wait, which keeps its place. A session that waits sees nothing, though: if the
first in line is a process that has stopped, somebody must look whether a slot is free all the same. So the wait is cut
after ``FIRST_STAND_MS``, and then whenever it has lasted as long again as all before: the place is lost then, but so
seldom that nobody starves. Two looks that find a free slot behind a gate where nothing moves prove that its holder has
stopped; from then on there is no order to keep, and the slots are tried every ``STUCK_MS``.
"""

from __future__ import annotations

import re
from typing import Final

from django_sqlsem.backends.applock.tsql import acquire, parts
from django_sqlsem.backends.applock.tsql.parts import type_of
from django_sqlsem.core.names import MAX_NAME_LENGTH, MAX_SLOTS
from django_sqlsem.database.sqlserver import MAX_UNITS, PREFIX

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
    IF {parts.holds("@gate")}
    BEGIN
        {parts.give("@gate")}
    END;
    IF {parts.holds("@base")}
        {throw("held", "You have acquired this semaphore already, in this very session.")}
    SELECT @entered = 1, @wanted = COALESCE(@slots, 0), @host = LEFT(COALESCE(HOST_NAME(), N''), 255), @pid = 0,
        @thread = CONCAT(N'session ', @@SPID), @work = LEFT(COALESCE(@label, APP_NAME(), N''), 200),
        @user = LEFT(COALESCE(ORIGINAL_LOGIN(), N''), 150),
        @permit = LOWER(REPLACE(CONVERT(varchar(36), NEWID()), '-', ''));
    SELECT @pid = COALESCE(host_process_id, 0), @session_us = {parts.LOGIN_US} FROM sys.dm_exec_sessions
    WHERE session_id = @@SPID;
"""

_ASK: Final = f"""
        SELECT @asked = SYSUTCDATETIME(), @start = CAST(RAND() * {MAX_SLOTS} AS int), @answer = {parts.BUSY};
        SET @left = CASE WHEN @timeout_ms IS NULL THEN 2147483647
            ELSE @timeout_ms - DATEDIFF_BIG(MILLISECOND, @began, @asked) END;
        SET @budget = CASE WHEN @head = 0 OR @left <= 0 THEN 0 WHEN @left < {BUDGET_MS} THEN @left ELSE {BUDGET_MS} END;
        SET @fair = CASE WHEN @head = 1 THEN 0 WHEN @stuck = 1 THEN 2 ELSE 1 END;
        EXEC sqlsem.internal_claim @base = @base, @gate = @gate, @slots = @wanted, @take = 1, @fair = @fair,
            @start = @start, @budget = @budget, @step = {acquire.FIRST_STEP_MS}, @key = @key, @kind = @kind,
            @permit = @permit, @lease = {LEASE_US}, @host = @host, @pid = @pid, @thread = @thread, @label = @work,
            @user = @user, @process = N'', @session_id = @@SPID, @session_us = @session_us, @record = @record,
            @answer = @answer OUTPUT, @got = @got OUTPUT, @number = @number OUTPUT, @seen_mark = @seen_mark OUTPUT,
            @limit = @limit OUTPUT, @blocked = @blocked OUTPUT, @fault = @fault OUTPUT, @why = @why OUTPUT;
        SET @left = CASE WHEN @timeout_ms IS NULL THEN 2147483647
            ELSE @timeout_ms - DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME()) END;
        IF @blocked = 1 SET @waited = 1;
"""

_JUDGE: Final = f"""
        IF @answer = {parts.DONE}
            SELECT @slot = @got, @token = @number, @result = CASE WHEN @waited = 1 THEN 1 ELSE 0 END
        ELSE IF @answer = {parts.NEW} AND @news < 5
        BEGIN
            SET @news = @news + 1;
            SET @limit = CASE WHEN @limit < 1 THEN 1 ELSE @limit END;
            EXEC sqlsem.internal_create @key = @key, @name = @name, @kind = @kind, @slots = @limit;
        END
        ELSE IF @answer = {parts.KIND} AND @why = N'mutex' AND @kind <> @why AND COALESCE(@slots, 1) = 1
            SET @kind = N'mutex';
        ELSE IF @answer = {parts.KIND}
        BEGIN
            SET @why = CONCAT(N'The name belongs to a lock of another kind, ', @why, N': it is no semaphore of ',
                COALESCE(@slots, 1), N' slots.');
            {throw("kind", "@why")}
        END
        ELSE IF @answer = {parts.PAUSED}
            SET @result = {PAUSED};
        ELSE IF @answer IN (-1, -2, -3)
            SET @result = @answer;
        ELSE IF @answer = {parts.ROW_FAILED} AND @fault IN (1205, 1222, 3960) AND @left > 0
            SET @waited = 1;
        ELSE IF @answer NOT IN ({parts.BUSY}, {parts.GATED})
        BEGIN
            SET @why = CONCAT(N'The semaphore could not be acquired (', @answer, N'). ', @why);
            {throw("failed", "@why")}
        END
        ELSE IF @left <= 0
        BEGIN
            -- The last look: if nothing was granted during the whole wait, nobody is served by that gate.
            IF @answer = {parts.GATED} AND @waited = 1 AND @seen_mark = @first_mark
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
                {parts.get("@base", "IntentExclusive", str(PAUSE_MS))}
                IF @rc >= 0
                BEGIN
                    {parts.give("@base")}
                    SELECT @i = 1, @resource = CONCAT(N'1-', @base);
                    WHILE @i < {MAX_SLOTS} AND NOT {parts.taken("@resource")}
                    BEGIN
                        SET @i = @i + 1;
                        SET @resource = CONCAT(@i, N'-', @base);
                    END;
                    {parts.get("@resource", "Exclusive", str(PAUSE_MS))}
                    IF @rc >= 0
                    BEGIN
                        {parts.give("@resource")}
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
            ELSE IF @answer = {parts.BUSY}
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
            {parts.get("@gate", "Exclusive", "@patience")}
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
    IF {parts.holds("@gate")}
    BEGIN
        {parts.give("@gate")}
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


SCHEMA: Final = "sqlsem"
#: Compares and cuts by UTF-16 units, as names are.
EXACT: Final = "COLLATE Latin1_General_100_BIN2"


def _hash(expression: str) -> str:
    """Return the SHA-256 of bytes, or of an nvarchar's UTF-16LE, in lower-case hex."""
    return f"LOWER(CONVERT(varchar(64), HASHBYTES('SHA2_256', {expression}), 2))"


def _base(name: str, digest: str) -> str:
    """Return what ``applock_names.lock_names`` says."""
    digits = f"PATINDEX(N'%[^0-9]%', {name} {EXACT})"
    return (
        f"CASE WHEN DATALENGTH({name}) > {2 * (MAX_UNITS - 11)} OR LEFT({name} {EXACT}, {len(PREFIX)}) = N'{PREFIX}'"
        f" OR ({digits} > 1 AND SUBSTRING({name} {EXACT}, {digits}, 1) = N'-')"
        f" THEN CONCAT(N'{PREFIX}', LEFT({digest}, 32)) ELSE {name} END"
    )


def _names() -> str:
    unit = f"SUBSTRING(@name {EXACT}, @i, 1)"
    following = f"UNICODE(SUBSTRING(@name {EXACT}, @i + 1, 1))"
    digits = ", ".join(f"SUBSTRING('0123456789ABCDEF', @byte {part} + 1, 1)" for part in ("/ 16", "% 16"))
    ascii_only = f"@name {EXACT} NOT LIKE N'%[^ -~]%'"
    return f"""
DECLARE @digest varchar(64), @hex varchar(1600) = '', @i int = 1, @code int, @characters int = 0, @ill int = 0,
    @more int, @byte int;
SET @ill = CASE WHEN @name IS NULL OR DATALENGTH(@name) = 0 OR DATALENGTH(@name) > {4 * MAX_NAME_LENGTH} THEN 1
    ELSE 0 END;
IF @ill = 0 AND {ascii_only}
    SELECT @digest = {_hash(f"CAST(@name AS varchar({2 * MAX_NAME_LENGTH}))")},
        @characters = LEN(CONCAT(@name, N'x')) - 1;
ELSE IF @ill = 0
BEGIN
    -- The server's own conversion to UTF-8 needs a collation that not all versions have.
    WHILE DATALENGTH({unit}) > 0 AND @ill = 0
    BEGIN
        SET @code = UNICODE({unit});
        IF @code BETWEEN 55296 AND 56319 AND {following} BETWEEN 56320 AND 57343
            SELECT @code = 65536 + (@code - 55296) * 1024 + {following} - 56320, @i = @i + 1;
        IF @code = 0 OR @code BETWEEN 55296 AND 57343 SET @ill = 2;
        SET @more = CASE WHEN @code < 128 THEN 0 WHEN @code < 2048 THEN 1 WHEN @code < 65536 THEN 2 ELSE 3 END;
        SET @byte = CASE @more WHEN 0 THEN @code WHEN 1 THEN 192 + @code / 64 WHEN 2 THEN 224 + @code / 4096
            ELSE 240 + @code / 262144 END;
        SET @hex = CONCAT(@hex, {digits});
        WHILE @more > 0
        BEGIN
            SET @more = @more - 1;
            SET @byte = 128 + @code / POWER(64, @more) % 64;
            SET @hex = CONCAT(@hex, {digits});
        END;
        SELECT @i = @i + 1, @characters = @characters + 1;
    END;
    SET @digest = {_hash("CONVERT(varbinary(800), @hex, 2)")};
END;
IF @ill = 1 OR @characters > {MAX_NAME_LENGTH}
    {throw("argument", f"@name must have 1 to {MAX_NAME_LENGTH} characters.")}
IF @ill = 2
    {throw("argument", "@name must not contain a NUL character, or half a surrogate pair.")}
SET @key = LEFT(@digest, 32);
SET @digest = {_hash("@name")};
SELECT @base = {_base("@name", "@digest")}, @gate = CONCAT(N'{PREFIX}g:', LEFT(@digest, 20));
"""


#: Inside a transaction of the caller's nothing is written, so a name needs no rows there either.
_UNRECORDED: Final = f"""
IF @record = 0 AND @status = {parts.NEW}
    SELECT @n = CASE WHEN @n < 1 THEN 1 ELSE @n END,
        @status = CASE WHEN @paused = 1 THEN {parts.PAUSED} ELSE {parts.DONE} END;
"""
_DECLARE: Final = f"""
IF @record = 1 AND @status = {parts.DONE} AND @slots > 0 AND @declared <> @slots
BEGIN
    BEGIN TRY
        {parts.DECLARING.strip()} AND declared_us < {parts.NOW} - 60000000;
    END TRY
    BEGIN CATCH
        SET @error = 0;
    END CATCH;
END;
"""
_STEPS: Final = acquire.STEPS
_CLAIM: Final = f"""
DECLARE @mode varchar(32) = 'IntentExclusive', @place int = -1, @lock_mode nvarchar(8) = N'';
{_STEPS["variables"]}{_STEPS["read"]}{_UNRECORDED}{_STEPS["take"]}
IF @record = 1
BEGIN
{_STEPS["record"].strip()}
END;
{_STEPS["end"]}{_DECLARE}
SELECT @answer = @status, @seen_mark = @mark, @limit = @n, @blocked = @waited, @fault = @error, @why = @message;
IF @status = {parts.DONE}
    SELECT @got = CAST(SUBSTRING(@csv, 2, LEN(@csv) - 2) AS int), @number = CASE WHEN @record = 1 THEN @token END;
"""
_CLAIM_PARAMETERS: Final = (
    "base", "gate", "slots", "take", "fair", "start", "budget", "step", "key", "kind", "permit", "lease", "host", "pid",
    "thread", "label", "user", "process", "session_id", "session_us",
)  # fmt: skip
_CLAIM_ANSWERS: Final = (
    "@record bit, @answer int OUTPUT, @got int OUTPUT, @number bigint OUTPUT, @seen_mark bigint OUTPUT,"
    " @limit int OUTPUT, @blocked int OUTPUT, @fault int OUTPUT, @why nvarchar(2048) OUTPUT"
)

#: The permit of this very session: whoever has the lock has the row, unless it is stale.
_MINE: Final = f"""
SET @permit = NULL;
SELECT @permit = permit_id FROM sqlsem_slot {parts.SEEK}
WHERE semaphore_key = @key AND slot = @slot AND session_id = @@SPID
    AND session_us = (SELECT {parts.LOGIN_US} FROM sys.dm_exec_sessions WHERE session_id = @@SPID);
"""
_LET_GO: Final = f"""
DECLARE @permit nvarchar(32);
{parts.letting_go(f"IF @record = 1 BEGIN {_MINE} {parts.FREE} END;", "")}
SET @count = @freed;
-- A row that could not be written with its lock: it is still known by the permit.
IF @error <> 0 AND @permit IS NOT NULL
BEGIN
    BEGIN TRY
        {parts.FREE}
    END TRY
    BEGIN CATCH
        SET @error = 0;
    END CATCH;
END;
"""

_RELEASE: Final = f"""
SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DECLARE @base nvarchar(255), @gate nvarchar(255), @key nvarchar(32), @record bit = CASE WHEN @@TRANCOUNT = 0 THEN 1
    ELSE 0 END, @i int = 1, @csv nvarchar(20), @resource nvarchar(255), @count int, @released int = 0, @done int = 0;
BEGIN TRY
    EXEC sqlsem.internal_names @name = @name, @base = @base OUTPUT, @gate = @gate OUTPUT, @key = @key OUTPUT;
    IF {parts.holds("@gate")}
    BEGIN
        {parts.give("@gate")}
    END;
    SELECT @i = COALESCE(@slot, 1);
    WHILE @i BETWEEN 1 AND COALESCE(@slot, {MAX_SLOTS}) AND {parts.holds("@base")}
    BEGIN
        SELECT @resource = CONCAT(@i, N'-', @base), @csv = CONCAT(N',', @i, N','), @count = 0;
        IF {parts.holds("@resource")}
            EXEC sqlsem.internal_release @base = @base, @key = @key, @csv = @csv, @record = @record,
                @count = @count OUTPUT;
        SELECT @released = @released + @count, @i = @i + 1;
    END;
    -- A call that its client cut short may have left the name without a slot.
    IF @slot IS NULL AND {parts.holds("@base")}
    BEGIN
        {parts.give("@base")}
    END;
END TRY
BEGIN CATCH
    {RETHROW}
END CATCH;
RETURN CASE WHEN @released > 0 THEN 0 ELSE -1 END;
"""


def _look() -> str:
    """Return what shows all slots of a name, or of all names: one column list that stays as it is."""
    since = (
        "DATEADD(MICROSECOND, t.acquired_us % 1000000, DATEADD(SECOND, t.acquired_us / 1000000 % 60,"
        " DATEADD(MINUTE, t.acquired_us / 60000000, CAST('1970-01-01' AS datetime2(6)))))"
    )
    shown = {
        "host": "t.host", "pid": "t.pid", "label": "t.label", "[user]": "t.user_name", "session_id": "t.session_id",
        "since": since, "held_ms": f"({parts.NOW} - t.acquired_us) / 1000", "token": "t.token",
    }  # fmt: skip
    other = {"label": " WHEN t.taken = 1 THEN N'another program'"}
    recorded = ",\n    ".join(
        f"CASE WHEN t.expires_us IS NOT NULL THEN {value}{other.get(name, '')} END AS {name}"
        for name, value in shown.items()
    )
    return f"""
SELECT t.name, t.slot, t.slots, t.paused,
    CASE WHEN t.taken = 1 THEN N'held' WHEN t.expires_us IS NOT NULL THEN N'stale' ELSE N'free' END AS state,
    {recorded}
FROM (
    SELECT r.name, r.slot, r.slots, r.paused, r.host, r.pid, r.label, r.user_name, r.session_id, r.acquired_us,
        r.expires_us, r.token,
        CASE WHEN {parts.holds("r.resource")} THEN 1 WHEN {parts.taken("r.resource")} THEN 1 ELSE 0 END AS taken
    FROM (
        SELECT m.name, s.slot, COALESCE(m.operator_slots, m.declared_slots) AS slots, m.paused, s.host, s.pid, s.label,
            s.user_name, s.session_id, s.acquired_us, s.expires_us, s.token,
            CONCAT(s.slot, N'-', {_base("m.name", _hash("m.name"))}) AS resource
        FROM sqlsem_slot AS s
        JOIN sqlsem_semaphore AS m ON m.name_key = s.semaphore_key
        WHERE @key IS NULL OR m.name_key = @key
    ) AS r
) AS t
WHERE t.taken = 1 OR t.expires_us IS NOT NULL OR t.slot <= t.slots
ORDER BY t.name, t.slot;
"""


_STATUS: Final = f"""
SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DECLARE @base nvarchar(255), @gate nvarchar(255), @key nvarchar(32);
BEGIN TRY
    IF @name IS NOT NULL
        EXEC sqlsem.internal_names @name = @name, @base = @base OUTPUT, @gate = @gate OUTPUT, @key = @key OUTPUT;
    EXEC sqlsem.internal_look @key = @key;
END TRY
BEGIN CATCH
    {RETHROW}
END CATCH;
RETURN 0;
"""


def _typed(*names: str) -> str:
    return ", ".join(f"@{name} {type_of(name)}" for name in names)


def _parts() -> dict[str, tuple[str, str]]:
    """Return the parameters and the body of each procedure, by name."""
    out = "@base nvarchar(255) OUTPUT, @gate nvarchar(255) OUTPUT, @key nvarchar(32) OUTPUT"
    claim = _typed(*_CLAIM_PARAMETERS)
    return {
        "internal_names": (f"@name nvarchar(4000), {out}", _names()),
        "internal_create": (_typed("key", "name", "kind", "slots"), parts.CREATING),
        "internal_claim": (f"{claim}, {_CLAIM_ANSWERS}", _CLAIM),
        "internal_clean": (_typed("base", "gate", "bound"), parts.cleaning("")),
        "internal_release": (f"{_typed('base', 'key', 'csv')}, @record bit, @count int OUTPUT", _LET_GO),
        "internal_look": (_typed("key"), _look()),
        "acquire": (PARAMETERS, BODY),
        "release": ("@name nvarchar(4000), @slot int = NULL", _RELEASE),
        "status": ("@name nvarchar(4000) = NULL", _STATUS),
    }


def texts() -> dict[str, str]:
    """Return the statement that defines each procedure, by name."""
    head = f"SET NOCOUNT ON;\nSET LOCK_TIMEOUT {parts.ROW_PATIENCE_MS};\n"
    return {
        name: f"ALTER PROCEDURE {SCHEMA}.{name}\n    {parameters.strip()}\nAS\nBEGIN\n{head}{body.strip()}\nEND;\n"
        for name, (parameters, body) in _parts().items()
    }


_FIRST: Final = f"""-- Semaphores for programs without Django: see docs/backends/tsql.md of django-sqlsem.
-- Made by "manage.py locks sql"; run it anew after an upgrade. To let a role or a user call them:
--   GRANT EXECUTE ON {SCHEMA}.acquire TO [reports];
--   GRANT EXECUTE ON {SCHEMA}.release TO [reports];
--   GRANT EXECUTE ON {SCHEMA}.status TO [reports];
SET QUOTED_IDENTIFIER ON;
"""


def procedures(*, drop: bool = False) -> tuple[str, ...]:
    """Return the batches that install the procedures, or remove them. Either may be run again and again.

    A procedure is altered, not dropped: it keeps what was granted on it.
    """
    if drop:
        dropped = tuple(f"DROP PROCEDURE IF EXISTS {SCHEMA}.{name};\n" for name in reversed(_parts()))
        left = f"EXISTS (SELECT 1 FROM sys.objects WHERE schema_id = SCHEMA_ID(N'{SCHEMA}'))"
        schema = f"IF SCHEMA_ID(N'{SCHEMA}') IS NOT NULL AND NOT {left}\n    EXEC (N'DROP SCHEMA {SCHEMA};');\n"
        return (*dropped, schema)
    batches = [
        _FIRST,
        "SET ANSI_NULLS ON;\n",
        f"IF SCHEMA_ID(N'{SCHEMA}') IS NULL\n    EXEC (N'CREATE SCHEMA {SCHEMA} AUTHORIZATION dbo;');\n",
    ]
    for name, text in texts().items():
        known = f"OBJECT_ID(N'{SCHEMA}.{name}', N'P')"
        batches += [f"IF {known} IS NULL\n    EXEC (N'CREATE PROCEDURE {SCHEMA}.{name} AS RETURN 0;');\n", text]
    return tuple(batches)
