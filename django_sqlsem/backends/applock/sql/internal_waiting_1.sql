-- The row of a process that waits, for people to see. It lasts for five seconds; @waiting 0: it waits no longer.
CREATE OR ALTER PROCEDURE sqlsem.internal_waiting_1
    @ticket nvarchar(32),
    @key nvarchar(32),
    @waiting int,
    @age bigint,                             -- microseconds that it has waited
    @take int,
    @lock_mode nvarchar(8),
    @thread nvarchar(200),
    @label nvarchar(400),
    @user nvarchar(300),
    @session nvarchar(600)                   -- see internal_acquire_1
AS
SET NOCOUNT ON;
DECLARE @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
IF @waiting = 0
    DELETE w FROM dbo.sqlsem_waiter AS w WITH (ROWLOCK, FORCESEEK) WHERE ticket = @ticket;
ELSE
BEGIN
    UPDATE w SET expires_us = @now + 5000000, waiting = @waiting, lock_mode = @lock_mode, take = @take,
        thread = @thread, label = @label, user_name = @user
    FROM dbo.sqlsem_waiter AS w WITH (ROWLOCK, FORCESEEK) WHERE ticket = @ticket OPTION (KEEPFIXED PLAN);
    IF @@ROWCOUNT = 0
    BEGIN
        DELETE w FROM dbo.sqlsem_waiter AS w WITH (ROWLOCK, FORCESEEK)
        WHERE semaphore_key = @key AND expires_us < @now - 60000000;
        INSERT INTO dbo.sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, lease_us, away, waiting,
            host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, lock_mode)
        VALUES (@ticket, @key, @now - @age, @now + 5000000, @take, 0, 0, @waiting,
            SUBSTRING(@session, 73, 510), CAST(SUBSTRING(@session, 21, 20) AS bigint), @thread, @label, @user,
            SUBSTRING(@session, 41, 32), N'', N'', 0, @lock_mode);
    END;
END;
SELECT CONTEXT_INFO() AS stamp;
