-- The writer is an upgradable reader again, or who waits to be the writer gives that up.
-- A converted lock keeps the stronger mode until all of its counts are released; so it is released, and Update taken
-- anew. Nobody of ours comes between, as whoever wants the name in Update or Exclusive has slot 0 by then. Another
-- program may: then @result is -1, and nothing is kept.
CREATE OR ALTER PROCEDURE sqlsem.internal_downgrade_1
    @base nvarchar(255),
    @key nvarchar(32),
    @permit nvarchar(32)                     -- the upgradable reader's; NULL: without rows
AS
SET NOCOUNT ON;
DECLARE @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)), @result int = 0, @done int;
IF APPLOCK_MODE(N'public', @gate, N'Session') <> N'NoLock'
    EXEC @done = sys.sp_releaseapplock @gate, 'Session', 'public';
WHILE APPLOCK_MODE(N'public', @base, N'Session') NOT IN (N'NoLock', N'Update')
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
IF APPLOCK_MODE(N'public', @base, N'Session') = N'NoLock'
    EXEC @result = sys.sp_getapplock @base, 'Update', 'Session', 0, 'public';
IF @result < 0
    EXEC sqlsem.internal_release_1 @base, 0, NULL, @key, @permit, @answer = 0;
ELSE
BEGIN TRY
    UPDATE s SET lock_mode = N'update' FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
    WHERE semaphore_key = @key AND slot = 0 AND permit_id = @permit OPTION (KEEPFIXED PLAN);
END TRY
BEGIN CATCH
    SET @done = 0;                           -- what people see is not worth a permit
END CATCH;
SELECT @result AS result, CONTEXT_INFO() AS stamp;
