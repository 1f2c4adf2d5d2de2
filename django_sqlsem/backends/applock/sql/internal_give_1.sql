-- Free what this session has of a name: the slots in @taken (',3,7,'), and the name itself. What is not held is no error.
CREATE OR ALTER PROCEDURE sqlsem.internal_give_1
    @base nvarchar(255),
    @taken nvarchar(max),
    @freed int = NULL OUTPUT                 -- how many of the slots were held
AS
SET NOCOUNT ON;
DECLARE @resource nvarchar(255), @from int = 2, @to int, @done int;
SET @freed = 0;
SET @to = CHARINDEX(N',', @taken, @from);
WHILE @to > 0
BEGIN
    SET @resource = CONCAT(SUBSTRING(@taken, @from, @to - @from), N'-', @base);
    IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
    BEGIN
        EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
        SET @freed = @freed + 1;
    END;
    SET @from = @to + 1;
    SET @to = CHARINDEX(N',', @taken, @from);
END;
IF APPLOCK_MODE(N'public', @base, N'Session') <> N'NoLock'
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
