-- The rows of a name: create those that are missing, and note by how many slots it is known to this program.
CREATE OR ALTER PROCEDURE sqlsem.internal_declare_1
    @key nvarchar(32),
    @name nvarchar(400),
    @kind nvarchar(16),
    @slots int,
    @template nvarchar(400) = N'',           -- of a decorator; empty: the name was written as it is
    @answer bit = 0                          -- 1: a row
AS
SET NOCOUNT ON;
SET XACT_ABORT OFF;                          -- a row that another session has just created is no failure
DECLARE @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME()), @slot int, @first int;
BEGIN TRY
    INSERT INTO dbo.sqlsem_semaphore (name_key, name, kind, template, declared_slots, declared_us, paused, shrinking)
    SELECT @key, @name, @kind, @template, @slots, @now, 0, 0
    WHERE NOT EXISTS (SELECT 1 FROM dbo.sqlsem_semaphore WITH (FORCESEEK) WHERE name_key = @key);
END TRY
BEGIN CATCH
    IF ERROR_NUMBER() NOT IN (2601, 2627) THROW;
END CATCH;
-- Slot 0 of a readers-writer lock is its writer's.
SELECT @slot = COALESCE(MAX(slot), CASE WHEN @kind = N'rwlock' THEN -1 ELSE 0 END) + 1
FROM dbo.sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = @key;
SET @first = @slot;
WHILE @slot <= @slots
BEGIN
    BEGIN TRY
        INSERT INTO dbo.sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread,
            label, user_name, process_id, boot_id, channel, revoked_by, lock_mode)
        SELECT @key, @slot, CASE WHEN @slot = 0 THEN 1 ELSE 0 END, 0, 0, 0, 0, N'', 0, N'', N'', N'', N'', N'', N'',
            N'', N''
        WHERE NOT EXISTS (SELECT 1 FROM dbo.sqlsem_slot WITH (FORCESEEK)
            WHERE semaphore_key = @key AND slot = @slot);
    END TRY
    BEGIN CATCH
        IF ERROR_NUMBER() NOT IN (2601, 2627) THROW;
    END CATCH;
    SET @slot = @slot + 1;
END;
-- At most once a minute, as programs that disagree would write it again and again. Not by who has just made slots: those
-- who wait do not know of them yet, and it passes them.
IF @first > @slots
    UPDATE m SET other_slots = declared_slots, other_us = @now, declared_slots = @slots, declared_us = @now
    FROM dbo.sqlsem_semaphore AS m WITH (ROWLOCK, FORCESEEK)
    WHERE name_key = @key AND kind = @kind AND declared_slots <> @slots AND COALESCE(other_us, 0) < @now - 60000000;
IF @answer = 1
    SELECT CONTEXT_INFO() AS stamp;
