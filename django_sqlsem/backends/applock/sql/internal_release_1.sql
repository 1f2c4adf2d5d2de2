-- Give back one slot of a name. The lock goes before the row: nobody need wait for our commit. A row in which the next
-- holder is by then stays. @freed: whether it was held; @error and @why: why its row could not be written.
CREATE OR ALTER PROCEDURE sqlsem.internal_release_1
    @base nvarchar(255),
    @key nvarchar(32),
    @slot int,
    @permit nvarchar(32) = NULL              -- NULL: without rows
AS
SET NOCOUNT ON;
DECLARE @resource nvarchar(255) = CONCAT(@slot, N'-', @base), @freed int = 0, @error int = 0, @why nvarchar(2048) = N'',
    @now bigint, @done int;
IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
BEGIN
    EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    SET @freed = 1;
END;
IF APPLOCK_MODE(N'public', @base, N'Session') <> N'NoLock'
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
IF @permit IS NOT NULL
BEGIN TRY
    SET @now = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
    BEGIN TRANSACTION;
    UPDATE s SET permit_id = NULL, expires_us = NULL, held_us = CASE WHEN @now <= acquired_us THEN held_us
        WHEN held_us = 0 THEN @now - acquired_us ELSE held_us + (@now - acquired_us - held_us) / 8 END
    FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
    WHERE semaphore_key = @key AND slot = @slot AND permit_id = @permit OPTION (KEEPFIXED PLAN);
    COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
END TRY
BEGIN CATCH
    SELECT @error = ERROR_NUMBER(), @why = ERROR_MESSAGE();
    IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
END CATCH;
SELECT @freed AS freed, @error AS error, @why AS why, CONTEXT_INFO() AS stamp;
