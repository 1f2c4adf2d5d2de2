"""The stored procedures for programs without Django, made of the text that the backend itself runs.

``acquire``, ``release`` and ``status`` are an interface that stays (docs/backends/tsql.md); those that begin with
``internal_`` are not. Whatever reads a table is called, not written into ``acquire``: a table that is missing ends the
procedure that names it, and only its caller can catch that.
"""

from __future__ import annotations

from typing import Final

from django_sqlsem.backends import applock_acquire_sql as acquiring
from django_sqlsem.backends import applock_sql as sql
from django_sqlsem.backends.applock_names import MAX_UNITS, PREFIX
from django_sqlsem.backends.applock_parameters import type_of
from django_sqlsem.backends.applock_procedure_acquire import BODY, PARAMETERS, RETHROW, throw
from django_sqlsem.naming import MAX_NAME_LENGTH, MAX_SLOTS

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
IF @record = 0 AND @status = {sql.NEW}
    SELECT @n = CASE WHEN @n < 1 THEN 1 ELSE @n END,
        @status = CASE WHEN @paused = 1 THEN {sql.PAUSED} ELSE {sql.DONE} END;
"""
_DECLARE: Final = f"""
IF @record = 1 AND @status = {sql.DONE} AND @slots > 0 AND @declared <> @slots
BEGIN
    BEGIN TRY
        {sql.DECLARING.strip()} AND declared_us < {sql.NOW} - 60000000;
    END TRY
    BEGIN CATCH
        SET @error = 0;
    END CATCH;
END;
"""
_STEPS: Final = acquiring.STEPS
_CLAIM: Final = f"""
DECLARE @mode varchar(32) = 'IntentExclusive', @place int = -1, @lock_mode nvarchar(8) = N'';
{_STEPS["variables"]}{_STEPS["read"]}{_UNRECORDED}{_STEPS["take"]}
IF @record = 1
BEGIN
{_STEPS["record"].strip()}
END;
{_STEPS["end"]}{_DECLARE}
SELECT @answer = @status, @seen_mark = @mark, @limit = @n, @blocked = @waited, @fault = @error, @why = @message;
IF @status = {sql.DONE}
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
SELECT @permit = permit_id FROM sqlsem_slot {sql.SEEK}
WHERE semaphore_key = @key AND slot = @slot AND session_id = @@SPID
    AND session_us = (SELECT {sql.LOGIN_US} FROM sys.dm_exec_sessions WHERE session_id = @@SPID);
"""
_LET_GO: Final = f"""
DECLARE @permit nvarchar(32);
{sql.letting_go(f"IF @record = 1 BEGIN {_MINE} {sql.FREE} END;", "")}
SET @count = @freed;
-- A row that could not be written with its lock: it is still known by the permit.
IF @error <> 0 AND @permit IS NOT NULL
BEGIN
    BEGIN TRY
        {sql.FREE}
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
    IF {sql.holds("@gate")}
    BEGIN
        {sql.give("@gate")}
    END;
    SELECT @i = COALESCE(@slot, 1);
    WHILE @i BETWEEN 1 AND COALESCE(@slot, {MAX_SLOTS}) AND {sql.holds("@base")}
    BEGIN
        SELECT @resource = CONCAT(@i, N'-', @base), @csv = CONCAT(N',', @i, N','), @count = 0;
        IF {sql.holds("@resource")}
            EXEC sqlsem.internal_release @base = @base, @key = @key, @csv = @csv, @record = @record,
                @count = @count OUTPUT;
        SELECT @released = @released + @count, @i = @i + 1;
    END;
    -- A call that its client cut short may have left the name without a slot.
    IF @slot IS NULL AND {sql.holds("@base")}
    BEGIN
        {sql.give("@base")}
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
        "since": since, "held_ms": f"({sql.NOW} - t.acquired_us) / 1000", "token": "t.token",
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
        CASE WHEN {sql.holds("r.resource")} THEN 1 WHEN {sql.taken("r.resource")} THEN 1 ELSE 0 END AS taken
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
        "internal_create": (_typed("key", "name", "kind", "slots"), sql.CREATING),
        "internal_claim": (f"{claim}, {_CLAIM_ANSWERS}", _CLAIM),
        "internal_clean": (_typed("base", "gate", "bound"), sql.cleaning("")),
        "internal_release": (f"{_typed('base', 'key', 'csv')}, @record bit, @count int OUTPUT", _LET_GO),
        "internal_look": (_typed("key"), _look()),
        "acquire": (PARAMETERS, BODY),
        "release": ("@name nvarchar(4000), @slot int = NULL", _RELEASE),
        "status": ("@name nvarchar(4000) = NULL", _STATUS),
    }


def texts() -> dict[str, str]:
    """Return the statement that defines each procedure, by name."""
    head = f"SET NOCOUNT ON;\nSET LOCK_TIMEOUT {sql.ROW_PATIENCE_MS};\n"
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
