-- Does this session still have its locks? @missing: how many slots it has not; @asked: who asks holders to stop, a line
-- each: the permit's 32 characters, and the operator.
-- @held: one entry after the other, of the key (32 characters), the permit (32), the slot (6), the length of what ends
-- the resource (4), and that.
CREATE OR ALTER PROCEDURE sqlsem.internal_prove_1
    @held nvarchar(max),
    @record bit
AS
SET NOCOUNT ON;
SET LOCK_TIMEOUT 100;                        -- what is read here is not urgent
DECLARE @missing int = 0, @asked nvarchar(max) = N'', @at int = 1, @slot int, @length int,
    @resource nvarchar(255), @by nvarchar(300);
WHILE @at <= LEN(@held)
BEGIN
    SELECT @slot = CAST(SUBSTRING(@held, @at + 64, 6) AS int), @length = CAST(SUBSTRING(@held, @at + 70, 4) AS int);
    SET @resource = CONCAT(@slot, N'-', SUBSTRING(@held, @at + 74, @length));
    IF APPLOCK_MODE(N'public', @resource, N'Session') = N'NoLock' SET @missing = @missing + 1;
    IF @record = 1
    BEGIN TRY
        SET @by = NULL;
        SELECT @by = stop_by FROM dbo.sqlsem_slot WITH (FORCESEEK)
        WHERE semaphore_key = SUBSTRING(@held, @at, 32) AND slot = @slot
            AND permit_id = SUBSTRING(@held, @at + 32, 32) AND stop_token = token
        OPTION (KEEPFIXED PLAN);
        IF @by IS NOT NULL SET @asked = CONCAT(@asked, SUBSTRING(@held, @at + 32, 32), @by, NCHAR(10));
    END TRY
    BEGIN CATCH
        SET @by = NULL;                      -- the row is locked at this moment: the next proof reads it
    END CATCH;
    SET @at = @at + 74 + @length;
END;
SELECT @missing AS missing, @asked AS asked, CONTEXT_INFO() AS stamp;
