-- The usual case of internal_acquire_1 in as few statements as it can be: one of a few slots, nobody waits, and no
-- operator has said anything. Whatever is otherwise, internal_acquire_1 answers.
CREATE OR ALTER PROCEDURE sqlsem.internal_try_1
    @base nvarchar(255),
    @key nvarchar(32),
    @kind nvarchar(16),
    @slots int,
    @permit nvarchar(32) = NULL,             -- NULL: without rows
    @thread nvarchar(200) = NULL,
    @label nvarchar(400) = NULL,
    @user nvarchar(300) = NULL,
    @session nvarchar(600) = NULL            -- see internal_acquire_1
AS
SET NOCOUNT ON;
DECLARE @named int = -1, @slot int = 0, @rc int = -1, @granted bit = 0, @now bigint, @usual bit = 0,
    @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)), @fence nvarchar(60), @resource nvarchar(255),
    @mode varchar(32) = CASE @kind WHEN N'mutex' THEN 'Exclusive' ELSE 'IntentExclusive' END;
BEGIN TRY
    -- Before any lock. If one were taken in vain, those who come at the same moment would stand in line for it, and each
    -- of them, this call too, would find that it has waited.
    IF @permit IS NULL SET @usual = 1;
    ELSE
        SELECT @usual = 1 FROM dbo.sqlsem_semaphore WITH (FORCESEEK)
        WHERE name_key = @key AND kind = @kind AND paused = 0 AND operator_slots IS NULL AND declared_slots = @slots
            AND COALESCE(other_us, 0) <= DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME()) - 3600000000
        OPTION (KEEPFIXED PLAN);
    IF @usual = 1 AND APPLOCK_TEST(N'public', @gate, N'Exclusive', N'Session') = 1
        EXEC @named = sys.sp_getapplock @base, @mode, 'Session', 0, 'public';
    WHILE @named >= 0 AND @rc = -1 AND @slot < @slots
    BEGIN
        SET @slot = @slot + 1;
        SET @resource = CONCAT(@slot, N'-', @base);
        EXEC @rc = sys.sp_getapplock @resource, 'Exclusive', 'Session', 0, 'public';
    END;
    SET @fence = CONCAT(N'sqlsem:f:', LEFT(@key, 20));
    IF @rc >= 0 AND APPLOCK_TEST(N'public', @fence, N'Exclusive', N'Session') = 1 SET @granted = 1;
    IF @granted = 1 AND @permit IS NOT NULL
    BEGIN
        -- The slot's lock is ours, so nobody else writes its row. Its token is the clock, if that has gone on.
        SET @now = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
        BEGIN TRANSACTION;
        UPDATE s SET token = @now, permit_id = @permit, acquired_us = @now, expires_us = @now + 60000000,
            lease_us = 60000000, suspect_us = NULL, lock_mode = CASE @kind WHEN N'mutex' THEN @kind ELSE N'' END,
            thread = @thread, label = @label, user_name = @user, session_id = @@SPID,
            session_us = CAST(SUBSTRING(@session, 1, 20) AS bigint), pid = CAST(SUBSTRING(@session, 21, 20) AS bigint),
            process_id = SUBSTRING(@session, 41, 32), host = SUBSTRING(@session, 73, 510)
        FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
        JOIN dbo.sqlsem_semaphore AS m WITH (FORCESEEK) ON m.name_key = s.semaphore_key
        WHERE s.semaphore_key = @key AND s.slot = @slot AND s.token < @now AND m.kind = @kind AND m.paused = 0
            AND m.operator_slots IS NULL AND m.declared_slots = @slots AND COALESCE(m.other_us, 0) <= @now - 3600000000
        OPTION (KEEPFIXED PLAN);
        SET @granted = @@ROWCOUNT;
        COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
    END;
END TRY
BEGIN CATCH
    SET @granted = 0;                        -- internal_acquire_1 tells what is wrong, if it still is
    IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
END CATCH;
IF @granted = 1
    SELECT 0 AS result, @slot AS taken, @now AS token, CONTEXT_INFO() AS stamp;
ELSE
BEGIN
    EXEC sqlsem.internal_release_1 @base, 1, @slot, @answer = 0;
    EXEC sqlsem.internal_acquire_1 @base, @key, @kind, @slots, @permit, @thread, @label, @user, @session,
        @answer = 1;
END;
