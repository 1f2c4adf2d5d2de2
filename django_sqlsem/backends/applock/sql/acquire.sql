-- sqlsem.acquire: take a slot of a named semaphore, or several, for this session. Programs in any language may call it;
-- Django's processes stand in the same line. See docs/backends/tsql.md of django-sqlsem.
-- Returns 0 at once, 1 after waiting, -1 nothing became free in time, -2 cancelled, -3 deadlock, -4 paused, -5 an
-- operator has left fewer than are wanted. Below 0 nothing of the name is held.
CREATE OR ALTER PROCEDURE sqlsem.acquire
    @name nvarchar(4000),
    @slots int = NULL,                       -- how many there are; NULL: as declared elsewhere, else 1
    @timeout_ms int = 25000,                 -- NULL: for ever. Below the 30 s after which .NET cancels
    @label nvarchar(4000) = NULL,
    @slot int = NULL OUTPUT,
    @token bigint = NULL OUTPUT,
    @waited_ms int = NULL OUTPUT,
    @take int = 1,
    @taken nvarchar(max) = NULL OUTPUT,      -- ',3,7,'
    @answer bit = 0                          -- 1: also as a row, for drivers without output parameters
AS
SET NOCOUNT ON;
SET IMPLICIT_TRANSACTIONS OFF;
-- ON: a cancel rolls back what is ours. In a caller's transaction that would let a locked row doom it.
IF @@TRANCOUNT = 0 SET XACT_ABORT ON;
ELSE SET XACT_ABORT OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 2000;                       -- for rows. All these are the caller's again at the end
DECLARE @base nvarchar(255), @gate nvarchar(255), @key nvarchar(32), @kind nvarchar(16) = N'semaphore', @head bit = 0,
    @result int = -10, @bound int, @why nvarchar(2048), @tries int = 0,
    @permit nvarchar(32), @thread nvarchar(200), @work nvarchar(400), @user nvarchar(300), @session nvarchar(600);
SELECT @slot = NULL, @token = NULL, @waited_ms = 0, @taken = N',';
BEGIN TRY
    EXEC sqlsem.internal_names_1 @name, @base OUTPUT, @key OUTPUT;
    SET @why = CASE
        WHEN @slots < 1 OR @slots > 10000
            THEN CONCAT(N'@slots is ', @slots, N': it must be from 1 to 10000, or NULL: as declared elsewhere, else 1.')
        WHEN @take IS NULL THEN N'@take is NULL: it must be from 1 to @slots.'
        WHEN @take < 1 OR @take > 10000 THEN CONCAT(N'@take is ', @take, N': it must be from 1 to @slots.')
        WHEN @timeout_ms < 0
            THEN CONCAT(N'@timeout_ms is ', @timeout_ms, N': it must be 0 or more, or NULL: wait for ever.') END;
    IF @why IS NOT NULL
        THROW 59301, @why, 1;
    IF APPLOCK_MODE(N'public', @base, N'Session') <> N'NoLock'
        THROW 59303, N'You have acquired this semaphore already, in this very session, or a call that was cancelled has: call sqlsem.release.', 1;
    -- A call that was cancelled may have left the gate closed: then this session is still the first in line.
    SET @gate = CONCAT(N'sqlsem:g:', LEFT(@key, 20));
    IF APPLOCK_MODE(N'public', @gate, N'Session') <> N'NoLock' SET @head = 1;
    SELECT @session = CONCAT(CAST(DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) AS char(20)),
        CAST(COALESCE(host_process_id, 0) AS char(20)), SPACE(32), LEFT(COALESCE(HOST_NAME(), N''), 255))
    FROM sys.dm_exec_sessions WHERE session_id = @@SPID;
    IF @session IS NULL SET @session = SPACE(72);        -- an application role may not see its own session
    SELECT @permit = LOWER(REPLACE(CONVERT(varchar(36), NEWID()), '-', '')), @thread = CONCAT(N'session ', @@SPID),
        @work = LEFT(COALESCE(@label, APP_NAME(), N''), 200),
        @user = LEFT(COALESCE(ORIGINAL_LOGIN(), N''), 150), @slots = COALESCE(@slots, 0);
    WHILE @result = -10 AND @tries < 5
    BEGIN
        EXEC sqlsem.internal_acquire_1 @base = @base, @key = @key, @kind = @kind, @slots = @slots, @permit = @permit,
            @thread = @thread, @label = @work, @user = @user, @session = @session, @take = @take, @timeout = @timeout_ms,
            @look = 5000, @keep = 0, @head = @head OUTPUT, @result = @result OUTPUT, @taken = @taken OUTPUT,
            @token = @token OUTPUT, @bound = @bound OUTPUT, @waited_ms = @waited_ms OUTPUT, @why = @why OUTPUT;
        IF @result = -10
            EXEC sqlsem.internal_declare_1 @key, @name, @kind, @bound;
        SET @tries = @tries + 1;
    END;
    IF @result = -11
    BEGIN
        SET @why = CONCAT(N'The name belongs to a lock of another kind, ', @why, N'. Once nobody uses it,',
            N' "manage.py locks purge --idle" frees the name.');
        THROW 59302, @why, 1;
    END;
    IF @result = -12
    BEGIN
        SET @why = CONCAT(N'@take is ', @take, N', and there are ', @bound, N' slots.');
        THROW 59301, @why, 1;
    END;
    IF @result < -5
    BEGIN
        SET @why = CONCAT(N'The semaphore could not be acquired (', @result, N'). ', REPLACE(@why, N'%', N'%%'));
        THROW 59305, @why, 1;
    END;
END TRY
BEGIN CATCH
    IF ERROR_NUMBER() IN (207, 208)          -- a table is missing, and nothing is held for want of it
        THROW 59304, N'The tables of django_sqlsem are not in this database: run manage.py migrate on it.', 1;
    THROW;
END CATCH;
IF @result >= 0 SET @slot = CAST(SUBSTRING(@taken, 2, CHARINDEX(N',', @taken, 2) - 2) AS int);
IF @answer = 1
    SELECT @result AS rc, @slot AS slot, @taken AS taken, @token AS token, @waited_ms AS waited_ms;
RETURN @result;
