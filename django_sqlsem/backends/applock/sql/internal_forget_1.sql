-- The session that had a permit has ended: its rows are freed. @by: who revoked it, if somebody did.
CREATE OR ALTER PROCEDURE sqlsem.internal_forget_1
    @key nvarchar(32),
    @permit nvarchar(32),
    @slot int,
    @token bigint,
    @by nvarchar(300) = NULL OUTPUT,
    @answer bit = 0                          -- 1: the answer also as a row
AS
SET NOCOUNT ON;
UPDATE s SET permit_id = NULL, expires_us = NULL
FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
WHERE semaphore_key = @key AND permit_id = @permit OPTION (KEEPFIXED PLAN);
SET @by = NULL;
SELECT @by = revoked_by FROM dbo.sqlsem_slot WITH (FORCESEEK)
WHERE semaphore_key = @key AND slot = @slot AND revoked_token = @token OPTION (KEEPFIXED PLAN);
IF @answer = 1
    SELECT @by AS revoked_by, CONTEXT_INFO() AS stamp;
