-- What the rows say, in four results: the server's time; names; their slots; who waits for them. The rows tell who, the
-- locks tell whether.
CREATE OR ALTER PROCEDURE sqlsem.internal_read_1
    @keys nvarchar(max),                     -- of the names, each once, with commas between them; NULL: all
    @prefix nvarchar(400),                   -- only names that begin with it; NULL: any
    @template nvarchar(400) = NULL,          -- only names that it has made; empty: that none has; NULL: any
    @status bit = 0                          -- 1: the one result of sqlsem.status instead
AS
SET NOCOUNT ON;
DECLARE @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME()), @at int = 1;
-- In the collation of the tables: a column that names none has the database's, and columns of two are not compared (468).
DECLARE @wanted TABLE (name_key nvarchar(32) COLLATE Latin1_General_100_BIN2 NOT NULL PRIMARY KEY);
DECLARE @locks TABLE (semaphore_key nvarchar(32) COLLATE Latin1_General_100_BIN2 NOT NULL, slot int NOT NULL,
    taken bit NOT NULL, PRIMARY KEY (semaphore_key, slot));
IF @keys IS NULL
    INSERT INTO @wanted SELECT name_key FROM dbo.sqlsem_semaphore
    WHERE (@prefix IS NULL OR CHARINDEX(@prefix, name COLLATE Latin1_General_100_BIN2) = 1)
        AND (@template IS NULL OR template = @template);
-- Not by STRING_SPLIT, which a database of compatibility level 120 or below has not.
WHILE @at < LEN(@keys)
BEGIN
    INSERT INTO @wanted SELECT SUBSTRING(@keys, @at, 32);
    SET @at = @at + 33;
END;
INSERT INTO @locks
-- To its holder a lock is free: so first whether this very session has it.
SELECT r.semaphore_key, r.slot, CASE WHEN APPLOCK_MODE(N'public', r.resource, N'Session') <> N'NoLock' THEN 1
    WHEN APPLOCK_TEST(N'public', r.resource, N'Exclusive', N'Session') = 0 THEN 1 ELSE 0 END
FROM (
    SELECT s.semaphore_key, s.slot, CONCAT(s.slot, N'-', CASE WHEN DATALENGTH(m.name) > 488
        OR LEFT(m.name COLLATE Latin1_General_100_BIN2, 7) = N'sqlsem:'
        OR (PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2) > 1 AND SUBSTRING(
            m.name COLLATE Latin1_General_100_BIN2,
            PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2), 1) = N'-')
        THEN CONCAT(N'sqlsem:', m.name_key) ELSE m.name END) AS resource
    FROM dbo.sqlsem_slot AS s
    JOIN dbo.sqlsem_semaphore AS m ON m.name_key = s.semaphore_key
    JOIN @wanted AS v ON v.name_key = s.semaphore_key
) AS r;
IF @status = 1
BEGIN
    SELECT m.name, s.slot, m.slots, m.paused,
        CASE WHEN l.taken = 1 THEN N'held' WHEN h.id IS NOT NULL THEN N'stale' ELSE N'free' END AS state,
        h.host, h.pid, COALESCE(h.label, CASE l.taken WHEN 1 THEN N'another program' END) AS label,
        h.user_name AS [user], h.session_id,
        DATEADD(MICROSECOND, h.acquired_us % 1000000, DATEADD(SECOND, h.acquired_us / 1000000 % 60,
            DATEADD(MINUTE, h.acquired_us / 60000000, CAST('1970-01-01' AS datetime2(6))))) AS since,
        (@now - h.acquired_us) / 1000 AS held_ms, h.token
    FROM (
        SELECT name_key, name, paused, CASE kind WHEN N'mutex' THEN 1
            ELSE COALESCE(CASE WHEN slots_until_us <= @now THEN NULL ELSE operator_slots END, declared_slots)
            END AS slots
        FROM dbo.sqlsem_semaphore
    ) AS m
    JOIN dbo.sqlsem_slot AS s ON s.semaphore_key = m.name_key
    JOIN @locks AS l ON l.semaphore_key = s.semaphore_key AND l.slot = s.slot
    LEFT JOIN dbo.sqlsem_slot AS h ON h.id = s.id AND h.expires_us IS NOT NULL
    WHERE l.taken = 1 OR h.id IS NOT NULL OR s.slot <= m.slots
    ORDER BY m.name, s.slot;
    RETURN;
END;
SELECT @now AS now_us, CONTEXT_INFO() AS stamp;
SELECT m.name_key AS [key], m.name, m.kind, m.template, m.declared_slots, m.declared_us, m.operator_slots,
    m.slots_until_us, m.slots_by, m.slots_reason, m.paused, m.paused_us, m.paused_until_us, m.paused_by, m.paused_reason,
    m.other_slots, m.other_us, m.units,
    (SELECT MAX(s.acquired_us) FROM dbo.sqlsem_slot AS s WHERE s.semaphore_key = m.name_key) AS last_grant_us,
    (SELECT AVG(s.held_us) FROM dbo.sqlsem_slot AS s WHERE s.semaphore_key = m.name_key AND s.held_us > 0) AS usual_us,
    (SELECT SUM(w.take) FROM dbo.sqlsem_waiter AS w
        WHERE w.semaphore_key = m.name_key AND w.away = 1 AND w.expires_us <= @now) AS overdue,
    -- The row of one who waits comes a moment later.
    CASE APPLOCK_TEST(N'public', v.gate, N'Exclusive', N'Session') WHEN 0 THEN 1 ELSE 0 END AS line
FROM dbo.sqlsem_semaphore AS m
JOIN (SELECT name_key, CONCAT(N'sqlsem:g:', LEFT(name_key, 20)) AS gate FROM @wanted) AS v ON v.name_key = m.name_key
ORDER BY m.name;
SELECT s.semaphore_key AS semaphore_id, s.slot, s.token, s.acquired_us, s.expires_us, s.lease_us, s.host, s.pid,
    s.thread, s.label, s.user_name AS [user], s.session_id, s.session_us, s.lock_mode AS mode, s.stop_token, s.stop_by,
    l.taken
FROM dbo.sqlsem_slot AS s JOIN @locks AS l ON l.semaphore_key = s.semaphore_key AND l.slot = s.slot
ORDER BY s.slot;
SELECT w.semaphore_key AS semaphore_id, w.queued_us, w.waiting, w.take, w.host, w.pid, w.thread, w.label,
    w.user_name AS [user], w.process_id, w.lock_mode AS mode
FROM dbo.sqlsem_waiter AS w JOIN @wanted AS v ON v.name_key = w.semaphore_key
WHERE w.away = 0 AND w.expires_us > @now
ORDER BY w.queued_us, w.id;
