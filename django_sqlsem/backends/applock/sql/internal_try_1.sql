-- The usual case of internal_acquire_1 in as few statements as it can be: one of a few slots, nobody waits, and no
-- operator has said anything. @result: 0 granted; -1 no slot is free, or somebody waits; -9 ask internal_acquire_1.
CREATE OR ALTER PROCEDURE sqlsem.internal_try_1
    @base nvarchar(255),
    @key nvarchar(32),
    @kind nvarchar(16),
    @slots int,
    @permit nvarchar(32) = NULL,             -- NULL: without rows
    @host nvarchar(510) = N'',
    @pid bigint = 0,
    @thread nvarchar(200) = N'',
    @label nvarchar(400) = N'',
    @user nvarchar(300) = N'',
    @process nvarchar(32) = N'',
    @session_us bigint = NULL
AS
SET NOCOUNT ON;
DECLARE @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)), @fence nvarchar(60), @resource nvarchar(255),
    @lately bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME()) - 3600000000,
    @mode varchar(32) = CASE @kind WHEN N'mutex' THEN 'Exclusive' ELSE 'IntentExclusive' END,
    @lock_mode nvarchar(8) = CASE @kind WHEN N'mutex' THEN @kind ELSE N'' END, @rc int, @named int = -1,
    @slot int = 0, @result int = -1, @token bigint, @now bigint, @done int, @gone bit,
    @refused nvarchar(255) = N'', @refused_mode varchar(32) = 'Exclusive';
BEGIN TRY
    IF APPLOCK_TEST(N'public', @gate, N'Exclusive', N'Session') = 1
        EXEC @named = sys.sp_getapplock @base, @mode, 'Session', 0, 'public';
    IF @named >= 0
    BEGIN
        SELECT @rc = -1, @fence = CONCAT(N'sqlsem:f:', LEFT(@key, 20));
        WHILE @rc = -1 AND @slot < @slots
        BEGIN
            SET @slot = @slot + 1;
            SET @resource = CONCAT(@slot, N'-', @base);
            EXEC @rc = sys.sp_getapplock @resource, 'Exclusive', 'Session', 0, 'public';
        END;
        IF @rc >= 0
        BEGIN
            -- The slot's lock is ours, so nobody else writes its row.
            IF @permit IS NOT NULL
                SELECT @token = s.token FROM dbo.sqlsem_slot AS s WITH (FORCESEEK)
                JOIN dbo.sqlsem_semaphore AS m WITH (FORCESEEK) ON m.name_key = s.semaphore_key
                WHERE s.semaphore_key = @key AND s.slot = @slot AND m.kind = @kind AND m.paused = 0
                    AND m.declared_slots = @slots AND m.operator_slots IS NULL AND COALESCE(m.other_us, 0) <= @lately
                OPTION (KEEPFIXED PLAN);
            SET @result = CASE WHEN (@token IS NULL AND @permit IS NOT NULL)
                OR APPLOCK_TEST(N'public', @fence, N'Exclusive', N'Session') = 0 THEN -9 ELSE 0 END;
        END;
        IF @result = 0 AND @permit IS NOT NULL
        BEGIN
            SET @now = @lately + 3600000000;
            SET @token = CASE WHEN @token >= @now THEN @token + 1 ELSE @now END;
            BEGIN TRANSACTION;
            UPDATE s SET token = @token, permit_id = @permit, acquired_us = @now, expires_us = @now + 60000000,
                lease_us = 60000000, suspect_us = NULL, lock_mode = @lock_mode, host = @host, pid = @pid, thread = @thread,
                label = @label, user_name = @user, process_id = @process, session_id = @@SPID,
                session_us = @session_us
            FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
            WHERE semaphore_key = @key AND slot = @slot OPTION (KEEPFIXED PLAN);
            COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
        END;
    END;
    -- An operator may have made more slots of it, others go by fewer, it is another kind of lock, or somebody deletes it.
    IF @result = -1 AND @permit IS NOT NULL
    BEGIN
        SELECT @result = -9 FROM dbo.sqlsem_semaphore WITH (FORCESEEK)
        WHERE name_key = @key AND (COALESCE(operator_slots, 0) > CASE kind WHEN @kind THEN @slots ELSE -1 END
            OR ((operator_slots IS NULL OR slots_until_us <= @lately + 3600000000)
                AND (declared_slots <> @slots OR COALESCE(other_us, 0) > @lately)))
        OPTION (KEEPFIXED PLAN);
        IF @named < 0
            SELECT @refused = @base, @refused_mode = @mode;
        IF @named < 0 AND APPLOCK_TEST(N'public', @gate, N'Exclusive', N'Session') = 0
            SELECT @refused = @gate, @refused_mode = 'Exclusive';
        EXEC sqlsem.internal_gone_1 @key, @gone OUTPUT, @refused, @refused_mode;
        IF @gone = 1 SET @result = -9;
    END;
END TRY
BEGIN CATCH
    SET @result = -9;
    IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
END CATCH;
IF @result < 0 AND @named >= 0
BEGIN
    IF @rc >= 0 EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    EXEC @done = sys.sp_releaseapplock @base, 'Session', 'public';
END;
SELECT @result AS result, @slot AS slot, @token AS token, CONTEXT_INFO() AS stamp;
