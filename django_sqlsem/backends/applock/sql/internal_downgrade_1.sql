-- The writer is an upgradable reader again, or (@keep 0) nothing any more. Who waits to be the writer gives that up.
-- A converted lock keeps the stronger mode until all of its counts are released; so it is released, and Update taken
-- anew. Nobody of ours comes between, as whoever wants the name in Update or Exclusive has slot 0 by then. Another
-- program may: then @result is -1, and nothing is kept.
CREATE OR ALTER PROCEDURE sqlsem.internal_downgrade_1
    @base nvarchar(255),
    @key nvarchar(32),
    @keep bit,
    @permit nvarchar(32),
    @record bit,
    @result int = NULL OUTPUT,
    @freed int = NULL OUTPUT,                -- whether the place was given up
    @error int = NULL OUTPUT,
    @why nvarchar(2048) = NULL OUTPUT,
    @answer bit = 0                          -- 1: the answers also as a row
AS
SET NOCOUNT ON;
DECLARE @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)),
    @resource nvarchar(255) = CONCAT(N'0-', @base), @done int,
    @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
SELECT @result = 0, @freed = 0, @error = 0, @why = N'';
IF APPLOCK_MODE(N'public', @gate, N'Session') <> N'NoLock'
    EXEC @done = sys.sp_releaseapplock @gate, 'Session', 'public';
WHILE APPLOCK_MODE(N'public', @base, N'Session') NOT IN (N'NoLock', CASE @keep WHEN 1 THEN N'Update' ELSE N'' END)
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
IF @keep = 1 AND APPLOCK_MODE(N'public', @base, N'Session') = N'NoLock'
    EXEC @result = sys.sp_getapplock @base, 'Update', 'Session', 0, 'public';
IF (@keep = 0 OR @result < 0) AND APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
BEGIN
    EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    SET @freed = 1;
END;
IF @record = 1
BEGIN TRY
    IF @keep = 1 AND @result >= 0
        UPDATE s SET lock_mode = N'update' FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
        WHERE semaphore_key = @key AND slot = 0 AND permit_id = @permit OPTION (KEEPFIXED PLAN);
    ELSE
        UPDATE s SET permit_id = NULL, expires_us = NULL, held_us = CASE WHEN @now <= acquired_us THEN held_us
            WHEN held_us = 0 THEN @now - acquired_us ELSE held_us + (@now - acquired_us - held_us) / 8 END
        FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
        WHERE semaphore_key = @key AND slot = 0 AND permit_id = @permit OPTION (KEEPFIXED PLAN);
END TRY
BEGIN CATCH
    SELECT @error = ERROR_NUMBER(), @why = ERROR_MESSAGE();
END CATCH;
IF @answer = 1
    SELECT @result AS result, @freed AS freed, @error AS error, @why AS why, CONTEXT_INFO() AS stamp;
