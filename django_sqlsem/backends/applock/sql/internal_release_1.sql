-- Give back what this session has of a name: slots, the name itself, and with slot 0 the gates. What it has not is no
-- error. Locks go before rows: nobody need wait for our commit. A row in which the next holder is by then stays.
-- Returns how many slots were held; the answer's error and why tell that a row could not be written.
CREATE OR ALTER PROCEDURE sqlsem.internal_release_1
    @base nvarchar(255),
    @slot int = NULL,                        -- the first that it may have; NULL: whatever it may have of the name
    @last int = NULL,                        -- the last; NULL: there is but one, or as the rows say
    @key nvarchar(32) = NULL,
    @permit nvarchar(32) = NULL,             -- whose rows are freed; empty: those of this session; NULL: without rows
    @answer bit = 1                          -- 0: not as a row
AS
SET NOCOUNT ON;
DECLARE @resource nvarchar(255), @i int = @slot, @done int, @now bigint, @freed int = 0, @error int = 0,
    @why nvarchar(2048) = N'';
IF @slot IS NULL
BEGIN
    IF @last IS NULL AND @permit IS NOT NULL
        SELECT @last = MAX(slot) FROM dbo.sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = @key
        OPTION (KEEPFIXED PLAN);
    SELECT @slot = 0, @i = 0, @last = COALESCE(@last, 10000);
END;
WHILE @i <= COALESCE(@last, @slot)
BEGIN
    IF @slot = 0
    BEGIN
        SET @resource = CONCAT(N'sqlsem:g:', LEFT(@key, 20), CASE WHEN @i > 0 THEN CONCAT(N':', @i) END);
        IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        -- What a cancelled call had for a moment only, to wait behind a fence: the slot's; then the name's, or a deletion.
        SET @resource = CONCAT(N'sqlsem:f:', LEFT(@key, 20), N':', @i);
        IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        SET @resource = CONCAT(CASE @i WHEN 0 THEN N'sqlsem:f:' ELSE N'sqlsem:d:' END, LEFT(@key, 20));
        IF @i < 2 AND APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    END;
    SET @resource = CONCAT(@i, N'-', @base);
    IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
    BEGIN
        EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        SET @freed = @freed + 1;
    END;
    SET @i = @i + 1;
END;
-- An upgrade counts as one more, and so does each slot that a program has taken by other means.
SET @i = CASE @slot WHEN 0 THEN 10000 ELSE 1 END;
WHILE @i > 0 AND APPLOCK_MODE(N'public', @base, N'Session') <> N'NoLock'
BEGIN
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
    SET @i = @i - 1;
END;
IF @permit IS NOT NULL AND @@TRANCOUNT = 0
BEGIN TRY
    SET @now = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
    BEGIN TRANSACTION;
    UPDATE s SET permit_id = NULL, expires_us = NULL, held_us = CASE WHEN @now <= acquired_us THEN held_us
        WHEN held_us = 0 THEN @now - acquired_us ELSE held_us + (@now - acquired_us - held_us) / 8 END
    FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
    WHERE semaphore_key = @key AND slot BETWEEN @slot AND COALESCE(@last, @slot)
        AND (permit_id = @permit OR @permit = N'' AND session_id = @@SPID)
    OPTION (KEEPFIXED PLAN);
    COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
END TRY
BEGIN CATCH
    SELECT @error = ERROR_NUMBER(), @why = ERROR_MESSAGE();
    IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
END CATCH;
IF @answer = 1
    SELECT @freed AS freed, @error AS error, @why AS why, CONTEXT_INFO() AS stamp;
RETURN @freed;
