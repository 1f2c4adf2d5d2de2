-- A call was refused: is that because somebody deletes the name, as nobody has used it for long? Who does has all its
-- locks until that is done. @gone: 1: so it was, or there is no such name: try again.
CREATE OR ALTER PROCEDURE sqlsem.internal_gone_1
    @key nvarchar(32),
    @gone bit = NULL OUTPUT,
    @refused nvarchar(255) = N'',            -- the lock that was refused without a wait, if it was one that deleting takes
    @mode varchar(32) = 'Exclusive'          -- in which mode
AS
SET NOCOUNT ON;
DECLARE @deletion nvarchar(60) = CONCAT(N'sqlsem:d:', LEFT(@key, 20)), @wait int = 2000, @rc int, @done int;
SET @gone = 1;
IF @refused = N'' AND APPLOCK_TEST(N'public', @deletion, N'Exclusive', N'Session') = 1
    SELECT @gone = 0 FROM dbo.sqlsem_semaphore WITH (FORCESEEK) WHERE name_key = @key OPTION (KEEPFIXED PLAN);
ELSE
BEGIN
    EXEC @rc = sys.sp_getapplock @deletion, 'Shared', 'Session', @wait, 'public';
    -- Nobody deletes it now. Who began to, and found it in use, has left the name, but nothing that refuses.
    IF @rc >= 0 AND @refused <> N'' AND APPLOCK_TEST(N'public', @refused, @mode, N'Session') = 0
        SELECT @gone = 0 FROM dbo.sqlsem_semaphore WITH (FORCESEEK) WHERE name_key = @key OPTION (KEEPFIXED PLAN);
    IF @rc >= 0 EXEC @done = sys.sp_releaseapplock @deletion, 'Session', 'public';
END;
