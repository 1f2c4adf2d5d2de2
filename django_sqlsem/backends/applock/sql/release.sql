-- sqlsem.release: give back what this session has of a semaphore, or what an acquire has left that was cancelled.
-- Returns 0, or -1 if it had nothing; that is no error.
CREATE OR ALTER PROCEDURE sqlsem.release
    @name nvarchar(4000),
    @slot int = NULL,                        -- only for a session that holds several by other means; NULL: all
    @answer bit = 0                          -- 1: also as a row
AS
SET NOCOUNT ON;
SET IMPLICIT_TRANSACTIONS OFF;
IF @@TRANCOUNT = 0 SET XACT_ABORT ON;
ELSE SET XACT_ABORT OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 2000;
DECLARE @base nvarchar(255), @key nvarchar(32), @freed int, @why nvarchar(200);
BEGIN TRY
    EXEC sqlsem.internal_names_1 @name, @base OUTPUT, @key OUTPUT;
    IF @slot < 1 OR @slot > 10000
    BEGIN
        SET @why = CONCAT(N'@slot is ', @slot, N': it must be from 1 to 10000, or NULL: all.');
        THROW 59301, @why, 1;
    END;
    EXEC @freed = sqlsem.internal_release_1 @base, @slot, NULL, @key, N'', @answer;
END TRY
BEGIN CATCH
    IF ERROR_NUMBER() IN (207, 208)
        THROW 59304, N'The tables of django_sqlsem are not in this database: run manage.py migrate on it.', 1;
    THROW;
END CATCH;
RETURN CASE WHEN @freed > 0 THEN 0 ELSE -1 END;
