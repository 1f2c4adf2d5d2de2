-- What the rows say, in four results: the server's time; names; their slots; who waits for them.
CREATE OR ALTER PROCEDURE sqlsem.internal_read_1
    @keys nvarchar(max),                     -- of the names, with commas between them; NULL: all
    @prefix nvarchar(400),                   -- only names that begin with it; NULL: any
    @template nvarchar(400) = NULL           -- only names that it has made; empty: that none has; NULL: any
AS
SET NOCOUNT ON;
DECLARE @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
DECLARE @wanted TABLE (name_key nvarchar(32) NOT NULL PRIMARY KEY);
IF @keys IS NOT NULL
    INSERT INTO @wanted SELECT DISTINCT value FROM STRING_SPLIT(@keys, N',');
ELSE
    INSERT INTO @wanted SELECT name_key FROM dbo.sqlsem_semaphore
    WHERE (@prefix IS NULL OR CHARINDEX(@prefix, name COLLATE Latin1_General_100_BIN2) = 1)
        AND (@template IS NULL OR template = @template);
SELECT @now AS now_us;
SELECT m.name_key AS [key], m.name, m.kind, m.template, m.declared_slots, m.declared_us, m.operator_slots,
    m.slots_until_us, m.slots_by, m.slots_reason, m.paused, m.paused_us, m.paused_until_us, m.paused_by, m.paused_reason,
    m.other_slots, m.other_us, m.units,
    (SELECT MAX(s.acquired_us) FROM dbo.sqlsem_slot AS s WHERE s.semaphore_key = m.name_key) AS last_grant_us,
    (SELECT AVG(s.held_us) FROM dbo.sqlsem_slot AS s WHERE s.semaphore_key = m.name_key AND s.held_us > 0) AS usual_us,
    (SELECT SUM(w.take) FROM dbo.sqlsem_waiter AS w
        WHERE w.semaphore_key = m.name_key AND w.away = 1 AND w.expires_us <= @now) AS overdue
FROM dbo.sqlsem_semaphore AS m JOIN @wanted AS v ON v.name_key = m.name_key
ORDER BY m.name;
SELECT r.semaphore_key AS semaphore_id, r.slot, r.token, r.acquired_us, r.expires_us, r.lease_us, r.host, r.pid,
    r.thread, r.label, r.user_name AS [user], r.session_id, r.session_us, r.lock_mode AS mode, r.stop_token, r.stop_by,
    -- To its holder a lock is free: so first whether this very session has it.
    CASE WHEN APPLOCK_MODE(N'public', r.resource, N'Session') <> N'NoLock' THEN 1
        WHEN APPLOCK_TEST(N'public', r.resource, N'Exclusive', N'Session') = 0 THEN 1 ELSE 0 END AS taken
FROM (
    SELECT s.semaphore_key, s.slot, s.token, s.acquired_us, s.expires_us, s.lease_us, s.host, s.pid, s.thread, s.label,
        s.user_name, s.session_id, s.session_us, s.lock_mode, s.stop_token, s.stop_by,
        CONCAT(s.slot, N'-', CASE WHEN DATALENGTH(m.name) > 488
            OR LEFT(m.name COLLATE Latin1_General_100_BIN2, 7) = N'sqlsem:'
            OR (PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2) > 1 AND SUBSTRING(
                m.name COLLATE Latin1_General_100_BIN2,
                PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2), 1) = N'-')
            THEN CONCAT(N'sqlsem:', m.name_key)
            ELSE m.name END) AS resource
    FROM dbo.sqlsem_slot AS s
    JOIN dbo.sqlsem_semaphore AS m ON m.name_key = s.semaphore_key
    JOIN @wanted AS v ON v.name_key = s.semaphore_key
) AS r
ORDER BY r.slot;
SELECT w.semaphore_key AS semaphore_id, w.queued_us, w.waiting, w.take, w.host, w.pid, w.thread, w.label,
    w.user_name AS [user], w.process_id, w.lock_mode AS mode
FROM dbo.sqlsem_waiter AS w JOIN @wanted AS v ON v.name_key = w.semaphore_key
WHERE w.away = 0 AND w.expires_us > @now
ORDER BY w.queued_us, w.id;
