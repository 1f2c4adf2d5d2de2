-- Give back what this session has of a name: the slots in @taken, or whatever it may have, the gate included.
-- Locks go before rows, as in internal_release_1.
CREATE OR ALTER PROCEDURE sqlsem.internal_clean_1
    @base nvarchar(255),
    @key nvarchar(32),
    @taken nvarchar(max) = NULL,             -- ',3,7,', ascending; NULL: all slots of the name
    @last int = NULL,                        -- the last of them all; NULL: as the rows say
    @permit nvarchar(32) = NULL,             -- whose rows are freed; NULL: those of this session
    @record bit = 1,
    @freed int = NULL OUTPUT,                -- how many slots were held
    @error int = NULL OUTPUT,                -- why a row could not be written
    @why nvarchar(2048) = NULL OUTPUT,
    @answer bit = 0                          -- 1: the answers also as a row
AS
SET NOCOUNT ON;
DECLARE @resource nvarchar(255), @slot int = 0, @greatest int, @done int, @now bigint;
SELECT @freed = 0, @error = 0, @why = N'';
IF @taken IS NULL
BEGIN
    SELECT @resource = CONCAT(N'sqlsem:g:', LEFT(@key, 20)), @taken = N',';
    IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
        EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    IF @last IS NULL AND @record = 1
        SELECT @last = MAX(slot) FROM dbo.sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = @key
        OPTION (KEEPFIXED PLAN);
    WHILE @slot <= COALESCE(@last, 10000)
    BEGIN
        SET @resource = CONCAT(@slot, N'-', @base);
        IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock' SET @taken = CONCAT(@taken, @slot, N',');
        SET @resource = CONCAT(N'sqlsem:g:', LEFT(@key, 20), N':', @slot);
        IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        SET @slot = @slot + 1;
    END;
END;
EXEC sqlsem.internal_give_1 @base, @taken, @freed OUTPUT;
IF LEN(@taken) > 1
    SELECT @slot = CAST(SUBSTRING(@taken, 2, CHARINDEX(N',', @taken, 2) - 2) AS int),
        @greatest = CAST(REVERSE(SUBSTRING(REVERSE(@taken), 2, CHARINDEX(N',', REVERSE(@taken), 2) - 2)) AS int);
ELSE SET @record = 0;
IF @record = 1 AND @@TRANCOUNT = 0
BEGIN TRY
    SET @now = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
    BEGIN TRANSACTION;
    UPDATE s SET permit_id = NULL, expires_us = NULL, held_us = CASE WHEN @now <= acquired_us THEN held_us
        WHEN held_us = 0 THEN @now - acquired_us ELSE held_us + (@now - acquired_us - held_us) / 8 END
    FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
    WHERE semaphore_key = @key AND slot BETWEEN @slot AND @greatest
        AND CHARINDEX(CONCAT(N',', slot, N','), @taken) > 0
        AND (permit_id = @permit OR @permit IS NULL AND session_id = @@SPID)
    OPTION (KEEPFIXED PLAN);
    COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
END TRY
BEGIN CATCH
    IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
    SELECT @error = ERROR_NUMBER(), @why = ERROR_MESSAGE();
END CATCH;
IF @answer = 1
    SELECT @freed AS freed, @error AS error, @why AS why, CONTEXT_INFO() AS stamp;
