-- The session that had a permit has ended: its rows are freed. The answer says who revoked it, if somebody did.
CREATE OR ALTER PROCEDURE sqlsem.internal_forget_1
    @key nvarchar(32),
    @permit nvarchar(32),
    @slot int,
    @token bigint
AS
SET NOCOUNT ON;
DECLARE @by nvarchar(300);
UPDATE s SET permit_id = NULL, expires_us = NULL
FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
WHERE semaphore_key = @key AND permit_id = @permit OPTION (KEEPFIXED PLAN);
SELECT @by = revoked_by FROM dbo.sqlsem_slot WITH (FORCESEEK)
WHERE semaphore_key = @key AND slot = @slot AND revoked_token = @token OPTION (KEEPFIXED PLAN);
SELECT @by AS revoked_by, CONTEXT_INFO() AS stamp;
