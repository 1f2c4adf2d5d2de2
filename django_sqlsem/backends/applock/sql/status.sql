-- sqlsem.status: one row a slot, of all names or of one. The rows tell who, the locks tell whether.
CREATE OR ALTER PROCEDURE sqlsem.status
    @name nvarchar(4000) = NULL
AS
SET NOCOUNT ON;
SET IMPLICIT_TRANSACTIONS OFF;
SET XACT_ABORT OFF;                          -- in a caller's transaction a locked row must not doom it
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 2000;
DECLARE @base nvarchar(255), @key nvarchar(32);
BEGIN TRY
    IF @name IS NOT NULL
        EXEC sqlsem.internal_names_1 @name, @base OUTPUT, @key OUTPUT;
    EXEC sqlsem.internal_read_1 @keys = @key, @prefix = NULL, @status = 1;
END TRY
BEGIN CATCH
    IF ERROR_NUMBER() IN (207, 208)
        THROW 59304, N'The tables of django_sqlsem are not in this database: run manage.py migrate on it.', 1;
    THROW;
END CATCH;
RETURN 0;
