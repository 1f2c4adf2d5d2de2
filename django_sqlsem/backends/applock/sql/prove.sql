-- sqlsem.prove: does this session still have a slot? 0, or -1. @stop_by: who has asked its holder to stop.
CREATE OR ALTER PROCEDURE sqlsem.prove
    @name nvarchar(4000),
    @slot int,
    @stop_by nvarchar(300) = NULL OUTPUT,
    @answer bit = 0                          -- 1: also as a row
AS
SET NOCOUNT ON;
SET IMPLICIT_TRANSACTIONS OFF;
-- In a caller's transaction a locked row must not doom it, nor what is read stay locked.
SET XACT_ABORT OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 100;
DECLARE @base nvarchar(255), @key nvarchar(32), @resource nvarchar(255), @result int = -1,
    @why nvarchar(200);
EXEC sqlsem.internal_names_1 @name, @base OUTPUT, @key OUTPUT;
IF @slot IS NULL OR @slot < 1 OR @slot > 10000
BEGIN
    SET @why = CONCAT(N'@slot is ', COALESCE(CAST(@slot AS nvarchar(11)), N'NULL'), N': it must be from 1 to 10000.');
    THROW 59301, @why, 1;
END;
SELECT @resource = CONCAT(@slot, N'-', @base), @stop_by = NULL;
IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock' SET @result = 0;
BEGIN TRY
    SELECT @stop_by = stop_by FROM dbo.sqlsem_slot WITH (FORCESEEK)
    WHERE @result = 0 AND semaphore_key = @key AND slot = @slot AND session_id = @@SPID AND stop_token = token
    OPTION (KEEPFIXED PLAN);
END TRY
BEGIN CATCH
    SET @stop_by = NULL;                     -- its row is locked at this moment: that is not urgent
END CATCH;
IF @answer = 1
    SELECT @result AS rc, @stop_by AS stop_by;
RETURN @result;
