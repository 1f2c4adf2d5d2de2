-- An upgradable reader asks to be the writer: its lock of the name is converted, which goes before all that wait.
-- @result: 0 granted; -1 the readers have not left; -4 paused; -13 the session is no upgradable reader. Newcomers are
-- kept out by the gate between two tries, until there is a grant, or a downgrade.
CREATE OR ALTER PROCEDURE sqlsem.internal_upgrade_1
    @base nvarchar(255),
    @key nvarchar(32),
    @slots int,
    @timeout int,                            -- milliseconds
    @close bit,                              -- 1: keep newcomers out
    @permit nvarchar(32)                     -- the upgradable reader's; NULL: without rows
AS
SET NOCOUNT ON;
DECLARE @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)),
    @fence nvarchar(60) = CONCAT(N'sqlsem:f:', LEFT(@key, 20)), @resource nvarchar(255), @result int, @bound int = @slots,
    @done int, @i int = 1, @began datetime2(3) = SYSUTCDATETIME(), @left int, @paused bit = 0;
IF @permit IS NOT NULL
    SELECT @paused = CASE WHEN paused = 1 AND (paused_until_us IS NULL OR paused_until_us
            > DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())) THEN 1 ELSE 0 END,
        @bound = (SELECT MAX(slot) FROM dbo.sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = @key)
    FROM dbo.sqlsem_semaphore WITH (FORCESEEK) WHERE name_key = @key OPTION (KEEPFIXED PLAN);
IF APPLOCK_MODE(N'public', @base, N'Session') NOT IN (N'Update', N'Exclusive') SET @result = -13;
IF @result IS NULL AND @close = 1 AND APPLOCK_MODE(N'public', @gate, N'Session') = N'NoLock'
    EXEC @done = sys.sp_getapplock @gate, 'Exclusive', 'Session', 0, 'public';
IF @result IS NULL AND @paused = 1 SET @result = -4;
IF @result IS NULL
    EXEC @result = sys.sp_getapplock @base, 'Exclusive', 'Session', @timeout, 'public';
-- Readers that are gone may have left transactions that are fenced with their permits.
IF @result >= 0 AND APPLOCK_TEST(N'public', @fence, N'Exclusive', N'Session') = 0
    WHILE @i <= @bound AND @result >= 0
    BEGIN
        SET @resource = CONCAT(@fence, N':', @i);
        SET @left = @timeout - DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME());
        IF @left < 0 SET @left = 0;
        EXEC @result = sys.sp_getapplock @resource, 'Exclusive', 'Session', @left, 'public';
        IF @result >= 0 AND APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        SET @i = @i + 1;
    END;
IF @result >= 0
BEGIN
    SET @result = 0;
    IF APPLOCK_MODE(N'public', @gate, N'Session') <> N'NoLock'
        EXEC @done = sys.sp_releaseapplock @gate, 'Session', 'public';
    BEGIN TRY
        UPDATE s SET lock_mode = N'whole' FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
        WHERE semaphore_key = @key AND slot = 0 AND permit_id = @permit OPTION (KEEPFIXED PLAN);
    END TRY
    BEGIN CATCH
        SET @done = 0;                       -- what people see must not cost a grant
    END CATCH;
END;
SELECT @result AS result, @bound AS bound, CONTEXT_INFO() AS stamp;
