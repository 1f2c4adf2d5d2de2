-- Does this session still have its locks? @missing: how many slots it has not; @asked: who asks holders to stop, a line
-- each: the permit's 32 characters, and the operator.
-- @held: one entry after the other, of the key (32 characters), the permit (32), the slot (6), the length of what ends
-- the resource (4), and that. It is counted in UTF-16 units: hence the collation, as a database's own may count by whole
-- characters.
CREATE OR ALTER PROCEDURE sqlsem.internal_prove_1
    @held nvarchar(max),
    @record bit
AS
SET NOCOUNT ON;
SET LOCK_TIMEOUT 100;                        -- what is read here is not urgent
DECLARE @missing int = 0, @asked nvarchar(max) = N'', @at int = 1, @entry nvarchar(400), @key nvarchar(32),
    @permit nvarchar(32), @slot int, @length int, @resource nvarchar(255), @by nvarchar(300);
WHILE @at <= LEN(@held COLLATE Latin1_General_100_BIN2)
BEGIN
    SET @entry = SUBSTRING(@held COLLATE Latin1_General_100_BIN2, @at, 329);
    SELECT @key = LEFT(@entry, 32), @permit = SUBSTRING(@entry, 33, 32), @slot = CAST(SUBSTRING(@entry, 65, 6) AS int),
        @length = CAST(SUBSTRING(@entry, 71, 4) AS int);
    SET @resource = CONCAT(@slot, N'-', SUBSTRING(@entry COLLATE Latin1_General_100_BIN2, 75, @length));
    IF APPLOCK_MODE(N'public', @resource, N'Session') = N'NoLock' SET @missing = @missing + 1;
    IF @record = 1
    BEGIN TRY
        SET @by = NULL;
        SELECT @by = stop_by FROM dbo.sqlsem_slot WITH (FORCESEEK)
        WHERE semaphore_key = @key AND slot = @slot AND permit_id = @permit AND stop_token = token
        OPTION (KEEPFIXED PLAN);
        IF @by IS NOT NULL SET @asked = CONCAT(@asked, @permit, @by, NCHAR(10));
    END TRY
    BEGIN CATCH
        SET @by = NULL;                      -- the row is locked at this moment: the next proof reads it
    END CATCH;
    SET @at = @at + 74 + @length;
END;
SELECT @missing AS missing, @asked AS asked, CONTEXT_INFO() AS stamp;
