-- Fence the caller's transaction: nobody is granted these slots before it ends. The answer is sp_getapplock's.
CREATE OR ALTER PROCEDURE sqlsem.internal_fence_1
    @key nvarchar(32),
    @taken nvarchar(max),                    -- ',3,7,'; empty: the permit has all slots
    @timeout int
AS
SET NOCOUNT ON;
DECLARE @fence nvarchar(60) = CONCAT(N'sqlsem:f:', LEFT(@key, 20)), @resource nvarchar(255), @from int = 2,
    @rc int, @to int, @mode varchar(32) = CASE @taken WHEN N'' THEN 'Shared' ELSE 'IntentShared' END, @one nvarchar(32);
-- An implicit transaction begins with a look at a table, not with a lock. It waits for nobody's row.
SELECT TOP (1) @one = name_key FROM dbo.sqlsem_semaphore WITH (NOLOCK);
EXEC @rc = sys.sp_getapplock @fence, @mode, 'Transaction', @timeout, 'public';
SET @to = CHARINDEX(N',', @taken, @from);
WHILE @rc >= 0 AND @to > 0
BEGIN
    SET @resource = CONCAT(@fence, N':', SUBSTRING(@taken, @from, @to - @from));
    EXEC @rc = sys.sp_getapplock @resource, 'Shared', 'Transaction', @timeout, 'public';
    SET @from = @to + 1;
    SET @to = CHARINDEX(N',', @taken, @from);
END;
SELECT @rc AS rc;
