-- Takes one slot of a lock, or stands in line for it. Prints "held SLOT TOKEN", "busy" or "wrong kind KIND".
-- Variables: name, kind, slots, lease (seconds), ticket (32 random hex digits, the same in every call), wait (1 or
-- 0), host (who holds it, for people).
\set now '(date_part(''epoch'', statement_timestamp()) * 1000000)::bigint'
\set lease_us '(' :lease ' * 1000000)::bigint'
SELECT left(encode(sha256(convert_to(:'name', 'UTF8')), 'hex'), 32) AS key \gset

INSERT INTO sqlsem_semaphore (name_key, name, kind, declared_slots, declared_us, paused, shrinking)
VALUES (:'key', :'name', :'kind', :slots, :now, false, false) ON CONFLICT DO NOTHING;

BEGIN;
-- While this row is locked the name is of this kind: Django's processes make a mutex of a semaphore, and back.
SELECT kind AS found, kind <> :'kind' AND NOT (kind = 'mutex' AND :'kind' = 'semaphore') AS wrong
FROM sqlsem_semaphore WHERE name_key = :'key' FOR UPDATE \gset
\if :wrong
    \echo wrong kind :found
    \quit
\endif

-- The rows of a name that is new, or has fewer slots than it should. A row stays when its slot is free.
INSERT INTO sqlsem_slot (semaphore_key, slot, closed, beacon, token, lease_us, held_us, host, pid, thread, label,
    user_name, process_id, boot_id, channel, revoked_by)
SELECT m.name_key, n, false, false, 0, 0, 0, '', 0, '', '', '', '', '', '', ''
FROM sqlsem_semaphore m, generate_series(1, COALESCE(m.operator_slots, :slots)) n
WHERE m.name_key = :'key' AND m.kind = :'kind'
    AND NOT EXISTS (SELECT 1 FROM sqlsem_slot s WHERE s.semaphore_key = m.name_key AND s.slot = n)
ON CONFLICT DO NOTHING;

-- While this row is locked nobody can hand a slot over to us.
SELECT count(*) FROM (
    SELECT 1 FROM sqlsem_waiter WHERE semaphore_key = :'key' AND ticket = :'ticket' FOR UPDATE
) w \g /dev/null

-- Somebody did before? What was handed over lapses after two seconds, unless it is renewed.
WITH u AS (
    UPDATE sqlsem_slot SET expires_us = :now + lease_us
    WHERE semaphore_key = :'key' AND permit_id = :'ticket' AND expires_us > :now RETURNING slot, token
)
SELECT count(*) > 0 AS held, COALESCE(min(slot), 0) AS slot, COALESCE(min(token), 0) AS token FROM u \gset

\if :held
\else
    -- For one lease after the server's start no lease has run out: holders could not renew while it was down.
    SELECT GREATEST((SELECT max(seen_us) FROM sqlsem_server),
        (date_part('epoch', pg_postmaster_start_time()) * 1000000)::bigint) AS since \gset

    WITH u AS (
        UPDATE sqlsem_slot SET token = GREATEST(token + 1, :now), permit_id = :'ticket', acquired_us = :now,
            expires_us = :now + :lease_us, lease_us = :lease_us, host = left(:'host', 255),
            pid = pg_backend_pid(), thread = '', label = 'psql', user_name = current_user, process_id = '',
            boot_id = '', channel = '', beacon = false, suspect_us = NULL,
            lock_mode = CASE :'kind' WHEN 'mutex' THEN 'mutex' ELSE '' END
        WHERE semaphore_key = :'key' AND id = (
            SELECT s.id FROM sqlsem_slot s JOIN sqlsem_semaphore m ON m.name_key = s.semaphore_key
            WHERE s.semaphore_key = :'key' AND NOT m.paused AND NOT m.shrinking AND NOT s.closed
                AND s.slot <= COALESCE(m.operator_slots, :slots)
                AND (s.expires_us IS NULL OR (s.expires_us <= :now AND s.lease_us <= :now - :since))
                -- First come, first served: live waiters go first, but for those who came after us, and with the slots
                -- that they could use: up to the number that each goes by.
                AND NOT EXISTS (
                    SELECT 1 FROM sqlsem_waiter w
                    LEFT JOIN sqlsem_waiter me ON me.semaphore_key = w.semaphore_key AND me.ticket = :'ticket'
                    WHERE w.semaphore_key = :'key' AND w.expires_us > :now AND NOT w.away AND w.ticket <> :'ticket'
                        AND (me.id IS NULL OR (w.queued_us, w.id) < (me.queued_us, me.id))
                        AND (w.take = 0 OR COALESCE(m.operator_slots, w.slots, m.declared_slots)
                            >= GREATEST(w.take, s.slot)))
            ORDER BY s.slot LIMIT 1 FOR UPDATE OF s SKIP LOCKED)
        RETURNING slot, token
    )
    SELECT count(*) > 0 AS held, COALESCE(min(slot), 0) AS slot, COALESCE(min(token), 0) AS token FROM u \gset
\endif

\if :held
    DELETE FROM sqlsem_waiter WHERE semaphore_key = :'key' AND ticket = :'ticket';
\elif :wait
    -- Our place in line. It counts for 2.1 seconds: call this again every half second.
    UPDATE sqlsem_waiter SET expires_us = :now + 2100000 WHERE semaphore_key = :'key' AND ticket = :'ticket';
    INSERT INTO sqlsem_waiter (ticket, semaphore_key, queued_us, expires_us, take, slots, lease_us, away, waiting,
        host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, lock_mode)
    VALUES (:'ticket', :'key', :now, :now + 2100000, 1, :slots, :lease_us, false, 1,
        left(:'host', 255), pg_backend_pid(), '', 'psql', current_user, '', '', '', false,
        CASE :'kind' WHEN 'mutex' THEN 'mutex' ELSE '' END)
    ON CONFLICT DO NOTHING;
\endif
COMMIT;

\if :held
    \echo held :slot :token
\else
    \echo busy
\endif
