-- The rows of sqlsem.status. A table that is missing ends the procedure that names it; only its caller can catch that.
CREATE OR ALTER PROCEDURE sqlsem.internal_status_1
    @key nvarchar(32)                        -- NULL: all names
AS
SET NOCOUNT ON;
DECLARE @now bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
SELECT t.name, t.slot, t.slots, t.paused,
    CASE WHEN t.taken = 1 THEN N'held' WHEN t.expires_us IS NOT NULL THEN N'stale' ELSE N'free' END AS state,
    CASE WHEN t.expires_us IS NOT NULL THEN t.host END AS host,
    CASE WHEN t.expires_us IS NOT NULL THEN t.pid END AS pid,
    CASE WHEN t.expires_us IS NOT NULL THEN t.label WHEN t.taken = 1 THEN N'another program' END AS label,
    CASE WHEN t.expires_us IS NOT NULL THEN t.user_name END AS [user],
    CASE WHEN t.expires_us IS NOT NULL THEN t.session_id END AS session_id,
    CASE WHEN t.expires_us IS NOT NULL THEN DATEADD(MICROSECOND, t.acquired_us % 1000000,
        DATEADD(SECOND, t.acquired_us / 1000000 % 60,
        DATEADD(MINUTE, t.acquired_us / 60000000, CAST('1970-01-01' AS datetime2(6))))) END AS since,
    CASE WHEN t.expires_us IS NOT NULL THEN (@now - t.acquired_us) / 1000 END AS held_ms,
    CASE WHEN t.expires_us IS NOT NULL THEN t.token END AS token
FROM (
    SELECT r.name, r.slot, r.slots, r.paused, r.host, r.pid, r.label, r.user_name, r.session_id, r.acquired_us,
        r.expires_us, r.token,
        -- To its holder a lock is free: so first whether this very session has it.
        CASE WHEN APPLOCK_MODE(N'public', r.resource, N'Session') <> N'NoLock' THEN 1
            WHEN APPLOCK_TEST(N'public', r.resource, N'Exclusive', N'Session') = 0 THEN 1 ELSE 0 END AS taken
    FROM (
        SELECT m.name, s.slot, CASE m.kind WHEN N'mutex' THEN 1
            ELSE COALESCE(CASE WHEN m.slots_until_us <= @now THEN NULL ELSE m.operator_slots END, m.declared_slots)
            END AS slots, m.paused, s.host, s.pid, s.label, s.user_name,
            s.session_id, s.acquired_us, s.expires_us, s.token,
            CONCAT(s.slot, N'-', CASE WHEN DATALENGTH(m.name) > 488
                OR LEFT(m.name COLLATE Latin1_General_100_BIN2, 7) = N'sqlsem:'
                OR (PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2) > 1 AND SUBSTRING(
                    m.name COLLATE Latin1_General_100_BIN2,
                    PATINDEX(N'%[^0-9]%', m.name COLLATE Latin1_General_100_BIN2), 1) = N'-')
                THEN CONCAT(N'sqlsem:', m.name_key)
                ELSE m.name END) AS resource
        FROM dbo.sqlsem_slot AS s
        JOIN dbo.sqlsem_semaphore AS m ON m.name_key = s.semaphore_key
        WHERE @key IS NULL OR m.name_key = @key
    ) AS r
) AS t
WHERE t.taken = 1 OR t.expires_us IS NOT NULL OR t.slot <= t.slots
ORDER BY t.name, t.slot;
