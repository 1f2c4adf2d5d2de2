-- What one caller of a process was granted after it had given up is another one's now, which waits in its place.
CREATE OR ALTER PROCEDURE sqlsem.internal_rename_1
    @key nvarchar(32),
    @before nvarchar(32),
    @permit nvarchar(32),
    @thread nvarchar(200),
    @label nvarchar(400),
    @user nvarchar(300)
AS
SET NOCOUNT ON;
UPDATE s SET permit_id = @permit, thread = @thread, label = @label, user_name = @user, stop_token = NULL
FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
WHERE semaphore_key = @key AND permit_id = @before OPTION (KEEPFIXED PLAN);
SELECT CONTEXT_INFO() AS stamp;
