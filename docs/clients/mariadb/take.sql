-- Takes one slot of a lock, or stands in line for it. Prints "held SLOT TOKEN", "busy" or "wrong kind KIND".
-- Variables: @name, @kind, @slots, @lease (seconds), @ticket (32 random hex digits, the same in every call), @wait (1
-- or 0), @host (who holds it, for people). On MySQL 8 read performance_schema.global_status instead of
-- information_schema.GLOBAL_STATUS.
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET @key = LEFT(SHA2(CONVERT(@name USING utf8mb4), 256), 32), @lease_us = @lease * 1000000;
SET @now = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));

INSERT IGNORE INTO sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)
SELECT @key, @name, @kind, @slots, @now, FALSE, FALSE FROM DUAL
WHERE NOT EXISTS (SELECT 1 FROM sqlsem_semaphore m WHERE m.name_key = @key);

-- For one lease after the server's start no lease has run out: holders could not renew while it was down.
SET @uptime = (SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'UPTIME');
SET @since = GREATEST((SELECT COALESCE(MAX(seen_us), 0) FROM sqlsem_server), @now - @uptime * 1000000);

START TRANSACTION;
-- While this row is locked the name is of this kind: Django's processes make a mutex of a semaphore, and back.
SET @found = NULL;
SELECT kind INTO @found FROM sqlsem_semaphore WHERE name_key = @key FOR UPDATE;
SET @right = @found = @kind OR (@found = 'mutex' AND @kind = 'semaphore');

-- The rows of a name that is new, or has fewer slots than it should. A row stays when its slot is free.
SET @bound = (SELECT COALESCE(operator_slots, @slots) FROM sqlsem_semaphore WHERE name_key = @key AND kind = @kind);
INSERT IGNORE INTO sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread,
    label, user_name, process_id, boot_id, channel, revoked_by)
WITH RECURSIVE n (slot) AS (SELECT 1 UNION ALL SELECT slot + 1 FROM n WHERE slot < @bound)
SELECT @key, n.slot, FALSE, FALSE, 0, 0, 0, '', 0, '', '', '', '', '', '', '' FROM n
WHERE @bound IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM sqlsem_slot s WHERE s.semaphore_key = @key AND s.slot = n.slot);

-- While this row is locked nobody can hand a slot over to us.
SET @queued = NULL, @place = NULL;
SELECT queued_us, id INTO @queued, @place FROM sqlsem_waiter WHERE ticket = @ticket FOR UPDATE;
SET @now = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));

-- Somebody did before? What was handed over lapses after two seconds, unless it is renewed.
UPDATE sqlsem_slot SET expires_us = @now + lease_us
WHERE semaphore_key = @key AND permit_id = @ticket AND expires_us > @now;
SET @held = ROW_COUNT();

-- First come, first served: live waiters go first, but for those who came after us, and with the slots that they could
-- use: up to the number that each goes by.
SET @wanted = (
    SELECT COALESCE(MAX(CASE WHEN w.take = 0 THEN 10000
        WHEN w.take <= COALESCE(m.operator_slots, w.slots, m.declared_slots)
        THEN COALESCE(m.operator_slots, w.slots, m.declared_slots) END), 0)
    FROM sqlsem_semaphore m JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key
    WHERE m.name_key = @key AND w.expires_us > @now AND NOT w.away AND w.ticket <> @ticket
        AND (@place IS NULL OR w.queued_us < @queued OR (w.queued_us = @queued AND w.id < @place)));
SET @bound = (SELECT COALESCE(operator_slots, @slots) FROM sqlsem_semaphore
    WHERE name_key = @key AND @right AND NOT paused AND NOT shrinking);
SET @row = NULL;
SELECT id INTO @row FROM sqlsem_slot
WHERE semaphore_key = @key AND @held = 0 AND NOT closed AND slot > @wanted AND slot <= @bound
    AND (expires_us IS NULL OR (expires_us <= @now AND lease_us <= @now - @since))
ORDER BY slot LIMIT 1 FOR UPDATE SKIP LOCKED;

UPDATE sqlsem_slot SET token = GREATEST(token + 1, @now), permit_id = @ticket, acquired_us = @now,
    expires_us = @now + @lease_us, lease_us = @lease_us, host = LEFT(@host, 255), pid = CONNECTION_ID(),
    thread = '', label = 'mariadb', user_name = LEFT(CURRENT_USER(), 150), process_id = '', boot_id = '',
    channel = '', beacon = FALSE, suspect_us = NULL, lock_mode = IF(@kind = 'mutex', 'mutex', '')
WHERE id = @row;
SET @held = @held + ROW_COUNT();

DELETE FROM sqlsem_waiter WHERE ticket = @ticket AND @held > 0;
-- Our place in line. It counts for 2.1 seconds: call this again every half second.
INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, slots, lease_us, away, waiting,
    host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, lock_mode)
SELECT @ticket, @key, @now, @now + 2100000, 1, @slots, @lease_us, FALSE, 1, LEFT(@host, 255), CONNECTION_ID(),
    '', 'mariadb', LEFT(CURRENT_USER(), 150), '', '', '', FALSE, IF(@kind = 'mutex', 'mutex', '')
FROM DUAL WHERE @held = 0 AND @wait = 1 AND @right
ON DUPLICATE KEY UPDATE expires_us = @now + 2100000;
COMMIT;

SELECT CASE WHEN @held > 0 THEN (
        SELECT CONCAT('held ', slot, ' ', token) FROM sqlsem_slot WHERE semaphore_key = @key AND permit_id = @ticket)
    WHEN NOT @right THEN CONCAT('wrong kind ', @found) ELSE 'busy' END AS answer;
