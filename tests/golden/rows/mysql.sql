-- The statements of the rows backend on this database. Written by python -m tests.golden: not to be edited.
-- {now} stands for TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

-- acquire.DECLARE
UPDATE sqlsem_semaphore
SET other_slots = declared_slots, other_us = {now}, declared_slots = %(slots)s, declared_us = {now}
WHERE name_key = %(key)s AND declared_slots <> %(slots)s;

-- acquire.GRANTED
SELECT id, slot, token, (SELECT declared_slots
  FROM sqlsem_semaphore
  WHERE name_key = %(key)s)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s
ORDER BY slot;

-- acquire.SLOTS
SELECT slot
FROM sqlsem_slot
WHERE semaphore_key = %(key)s;

-- acquire.TAKE_NEW
UPDATE sqlsem_slot
SET suspect_us = NULL, token = CASE WHEN token + 1 > {now} THEN token + 1 ELSE {now} END, permit_id = %(permit_id)s,
      acquired_us = {now}, expires_us = {now} + %(lease_us)s, lease_us = %(lease_us)s, lock_mode = %(lock_mode)s,
      host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id
      = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND slot BETWEEN 1 AND %(take)s;

-- beacons.BURY
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL, suspect_us = NULL
WHERE semaphore_key = %(key)s AND id = %(id)s;

-- beacons.GONE_OF
SELECT id, slot, token, permit_id, acquired_us, expires_us, lease_us, {now}, host, pid, thread, label, user_name,
      process_id, lock_mode, boot_id, suspect_us
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL
ORDER BY slot;

-- beacons.HELD_BY
SELECT n.name, n.kind, s.permit_id
FROM sqlsem_slot s
JOIN sqlsem_semaphore n ON n.name_key = s.semaphore_key
WHERE s.process_id = %(process_id)s AND s.permit_id IS NOT NULL AND s.lease_us > 0 AND s.expires_us IS NOT NULL;

-- beacons.NAME
SELECT name, kind, template
FROM sqlsem_semaphore
WHERE name_key = %(key)s;

-- beacons.STANDING
SELECT slot, token
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL;

-- beacons.TAKEN
SELECT DISTINCT s.semaphore_key, s.process_id, s.beacon, CASE WHEN (s.expires_us IS NULL OR (s.expires_us <= {now}
      AND s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token))) THEN 1 ELSE 0 END AS
      ran_out
FROM sqlsem_slot s
WHERE s.lease_us > 0 AND s.expires_us IS NOT NULL;

-- counters.FIND
SELECT id, take, away, expires_us - {now}
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s;

-- counters.HAND
UPDATE sqlsem_waiter
SET away = %(yes)s, expires_us = {now} + %(lasts_us)s
WHERE semaphore_key = %(key)s AND id = %(waiter)s AND away = %(no)s;

-- counters.LEAVE
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s AND away = %(no)s;

-- counters.LOCK
SELECT kind, units, CASE WHEN (paused = %(no)s OR paused_until_us <= {now}) THEN 0 ELSE 1 END
FROM sqlsem_semaphore
WHERE name_key = %(key)s
FOR UPDATE;

-- counters.LOOK_AROUND
SELECT (SELECT COUNT(*)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND sqlsem_waiter.lock_mode <>
      'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us OR (w.queued_us = sqlsem_waiter.queued_us AND w.id <
      sqlsem_waiter.id))), (SELECT CASE WHEN (m.paused = %(no)s OR m.paused_until_us <= {now}) THEN m.units ELSE 0
      END
  FROM sqlsem_semaphore m
  WHERE m.name_key = %(key)s), (SELECT MIN(CASE WHEN g.expires_us > {now} THEN g.expires_us - {now} ELSE 0 END)
  FROM sqlsem_waiter g
  WHERE g.semaphore_key = %(key)s AND g.away = %(yes)s)
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s AND away = %(no)s;

-- counters.OVERDUE
SELECT id, take, away
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND (NOT (expires_us > {now}) AND (away = %(yes)s OR expires_us < {now} -
      %(patience_us)s * 4) OR expires_us > {now} + %(patience_us)s * 2);

-- counters.SAVE
UPDATE sqlsem_semaphore
SET units = %(units)s, declared_us = {now}
WHERE name_key = %(key)s;

-- counters.STAND
INSERT INTO sqlsem_waiter (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, ticket,
      semaphore_key, queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting)
VALUES (%(host)s, %(pid)s, %(thread)s, %(label)s, %(user_name)s, %(process_id)s, %(boot_id)s, %(channel)s,
      %(beacon)s, %(permit_id)s, %(key)s, {now} - %(age_us)s, {now} + %(lasts_us)s, %(take)s, NULL, %(lease_us)s,
      %(away)s, '', %(waiting)s);

-- counters.STAY
UPDATE sqlsem_waiter
SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s AND away = %(no)s;

-- counters.TAKE
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s AND away = %(yes)s;

-- exclusive.AWAITED
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.lock_mode = 'mutex' AND w.expires_us > {now} AND w.away = %(no)s;

-- exclusive.BECOME
UPDATE sqlsem_semaphore
SET kind = %(becomes)s, shrinking = %(yes)s
WHERE name_key = %(key)s;

-- exclusive.CLEAR
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL
WHERE semaphore_key = %(key)s AND slot > 1 AND expires_us IS NOT NULL;

-- exclusive.CLOSE
UPDATE sqlsem_slot
SET closed = %(yes)s
WHERE semaphore_key = %(key)s AND closed = %(no)s AND slot > 1;

-- exclusive.END
UPDATE sqlsem_semaphore
SET operator_slots = NULL
WHERE name_key = %(key)s AND slots_until_us <= {now};

-- exclusive.FREE update
SELECT s.id, s.slot, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.slot = 0 AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <=
      ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)))
ORDER BY s.slot;

-- exclusive.FREE upgrade
SELECT s.id, s.slot, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.slot > 0 AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <=
      ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)))
ORDER BY s.slot;

-- exclusive.FREE whole
SELECT s.id, s.slot, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.slot >= 0 AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us
      <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)))
ORDER BY s.slot;

-- exclusive.LAPSE
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL
WHERE semaphore_key = %(key)s AND lock_mode = 'whole' AND expires_us IS NOT NULL;

-- exclusive.MARK
UPDATE sqlsem_semaphore
SET shrinking = %(yes)s
WHERE name_key = %(key)s;

-- exclusive.MORE
SELECT COUNT(*)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND slot > 1;

-- exclusive.MORE_FREE
SELECT s.id
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.slot > 1 AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <=
      ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)));

-- exclusive.MUTEX
SELECT COUNT(*)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND lock_mode = 'mutex';

-- exclusive.MUTEX_FREE
SELECT s.id
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.lock_mode = 'mutex' AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND
      s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)));

-- exclusive.NO_MUTEX
UPDATE sqlsem_slot
SET lock_mode = '', expires_us = NULL, permit_id = NULL
WHERE semaphore_key = %(key)s AND id = %(id)s;

-- exclusive.OPEN
UPDATE sqlsem_slot
SET closed = %(no)s
WHERE semaphore_key = %(key)s AND closed = %(yes)s AND slot > 0 AND slot <= COALESCE((SELECT CASE WHEN kind =
      'mutex' THEN 1 ELSE CASE WHEN slots_until_us <= {now} THEN NULL ELSE operator_slots END END
  FROM sqlsem_semaphore
  WHERE name_key = %(key)s), slot);

-- exclusive.STATE update
SELECT COUNT(CASE WHEN slot = 0 THEN 1 END), COUNT(CASE WHEN slot = 0 AND expires_us > {now} THEN 1 END), COUNT(CASE
      WHEN lock_mode = 'whole' AND NOT (expires_us IS NULL OR (expires_us <= {now} AND lease_us <= ABS({now} -
      %(since)s) AND (fenced IS NULL OR fenced <> token))) THEN 1 END)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s;

-- exclusive.STATE upgrade
SELECT COUNT(CASE WHEN slot > 0 THEN 1 END), COUNT(CASE WHEN slot > 0 AND expires_us > {now} THEN 1 END), COUNT(CASE
      WHEN lock_mode = 'whole' AND NOT (expires_us IS NULL OR (expires_us <= {now} AND lease_us <= ABS({now} -
      %(since)s) AND (fenced IS NULL OR fenced <> token))) THEN 1 END)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s;

-- exclusive.STATE whole
SELECT COUNT(CASE WHEN slot >= 0 THEN 1 END), COUNT(CASE WHEN slot >= 0 AND expires_us > {now} THEN 1 END),
      COUNT(CASE WHEN lock_mode = 'whole' AND NOT (expires_us IS NULL OR (expires_us <= {now} AND lease_us <=
      ABS({now} - %(since)s) AND (fenced IS NULL OR fenced <> token))) THEN 1 END)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s;

-- exclusive.TAKE update
UPDATE sqlsem_slot
SET suspect_us = NULL, token = %(token)s, permit_id = %(permit_id)s, acquired_us = {now}, expires_us = {now} +
      %(lasts_us)s, lease_us = %(lease_us)s, lock_mode = %(got)s, host = %(host)s, pid = %(pid)s, thread =
      %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s,
      channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND slot = 0;

-- exclusive.TAKE upgrade
UPDATE sqlsem_slot
SET suspect_us = NULL, token = %(token)s, permit_id = %(permit_id)s, acquired_us = {now}, expires_us = {now} +
      %(lasts_us)s, lease_us = %(lease_us)s, lock_mode = %(got)s, host = %(host)s, pid = %(pid)s, thread =
      %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s,
      channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND slot > 0;

-- exclusive.TAKE whole
UPDATE sqlsem_slot
SET suspect_us = NULL, token = %(token)s, permit_id = %(permit_id)s, acquired_us = {now}, expires_us = {now} +
      %(lasts_us)s, lease_us = %(lease_us)s, lock_mode = %(got)s, host = %(host)s, pid = %(pid)s, thread =
      %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s,
      channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND slot >= 0;

-- exclusive.UNMARK
UPDATE sqlsem_semaphore
SET shrinking = %(no)s
WHERE name_key = %(key)s;

-- exclusive.WAITED_FOR ('update', False)
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> '';

-- exclusive.WAITED_FOR ('update', True)
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> '' AND w.queued_us <
      COALESCE((SELECT a.queued_us
  FROM sqlsem_waiter a
  WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s), {now});

-- exclusive.WAITED_FOR ('whole', False)
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s;

-- exclusive.WAITED_FOR ('whole', True)
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.queued_us < COALESCE((SELECT
      a.queued_us
  FROM sqlsem_waiter a
  WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s), {now});

-- exclusive.WHOLE_RUN_OUT
SELECT s.id, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.expires_us IS NOT NULL AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND
      s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token))) AND s.lock_mode = 'whole';

-- fate
SELECT id, permit_id, CASE WHEN stop_token = token THEN stop_by END, revoked_token, revoked_by
FROM sqlsem_slot
WHERE id IN ({rows});

-- fences.ALONE
SELECT slot_id
FROM sqlsem_fence
WHERE slot_id = %(id)s
FOR UPDATE SKIP LOCKED;

-- fences.BESIDE
INSERT IGNORE INTO sqlsem_fence (slot_id, writes)
VALUES (%(id)s, 0);

-- fences.EXISTS
SELECT slot_id
FROM sqlsem_fence
WHERE slot_id = %(id)s;

-- fences.EXTEND
UPDATE sqlsem_slot
SET expires_us = {now} + lease_us
WHERE id IN ({ids}) AND permit_id = %(permit_id)s;

-- fences.LOOK
SELECT id, token, permit_id, expires_us > {now}, fenced = token
FROM sqlsem_slot
WHERE id IN ({ids});

-- fences.MARK
UPDATE sqlsem_slot
SET fenced = token
WHERE id IN ({ids}) AND permit_id = %(permit_id)s;

-- fences.MARKED
SELECT id, token
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND expires_us <= {now} AND fenced = token;

-- fences.RENEWED
UPDATE sqlsem_slot
SET expires_us = {now} + lease_us
WHERE id IN ({ids}) AND permit_id = %(permit_id)s AND expires_us > {now} AND fenced = token;

-- fences.SIBLING
SELECT slot_id
FROM sqlsem_fence
WHERE slot_id IN ({ids})
ORDER BY slot_id LOCK IN SHARE MODE;

-- fences.SIBLING_TAKEN
UPDATE sqlsem_fence
SET writes = writes + 1
WHERE slot_id = %(id)s;

-- fences.SIBLING_WRITTEN
UPDATE sqlsem_fence
SET writes = writes + 1
WHERE slot_id IN ({ids})
ORDER BY slot_id;

-- fences.UNMARK
UPDATE sqlsem_slot
SET fenced = NULL
WHERE id = %(id)s AND token = %(token)s AND expires_us <= {now};

-- free
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, held_us = CASE WHEN {now} <= acquired_us THEN held_us
      WHEN held_us = 0 THEN {now} - acquired_us ELSE held_us + ({now} - acquired_us - held_us) / 8 END
WHERE semaphore_key = %(key)s AND id IN (%(row0)s) AND permit_id = %(permit_id)s;

-- free two
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, held_us = CASE WHEN {now} <= acquired_us THEN held_us
      WHEN held_us = 0 THEN {now} - acquired_us ELSE held_us + ({now} - acquired_us - held_us) / 8 END
WHERE semaphore_key = %(key)s AND id IN (%(row0)s, %(row1)s) AND permit_id = %(permit_id)s;

-- free unwanted
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, held_us = CASE WHEN {now} <= acquired_us THEN held_us
      WHEN held_us = 0 THEN {now} - acquired_us ELSE held_us + ({now} - acquired_us - held_us) / 8 END
WHERE semaphore_key = %(key)s AND id IN (%(row0)s) AND permit_id = %(permit_id)s AND NOT EXISTS (SELECT 1
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update');

-- handoff.FREE
SELECT s.id, s.slot, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.closed = %(no)s AND s.slot > %(wanted)s AND s.slot <= %(bound)s AND
      (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL
      OR s.fenced <> s.token)))
ORDER BY s.slot LIMIT %(take)s;

-- handoff.HEADS
SELECT w.id, w.ticket, w.take, w.slots, w.lease_us, w.lock_mode, w.host, w.pid, w.thread, w.label, w.user_name,
      w.process_id, w.boot_id, w.channel, w.beacon
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND (%(witness)s = %(no)s OR NOT
      (w.beacon AND (CASE WHEN CHAR_LENGTH(w.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', w.process_id)) <=>
      1 ELSE FALSE END)))
ORDER BY CASE WHEN w.lock_mode = 'upgrade' THEN 0 ELSE 1 END, w.queued_us, w.id;

-- handoff.LEFT
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND id = %(waiter)s;

-- handoff.LOOK
SELECT CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, m.declared_slots, CASE WHEN
      (m.paused = %(no)s OR m.paused_until_us <= {now}) THEN 0 ELSE 1 END, CASE WHEN (m.shrinking = %(no)s AND
      (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})) THEN 0 ELSE 1 END, {now},
      CASE kind WHEN 'mutex' THEN 'mutex' ELSE '' END, w.id, w.ticket, w.take, w.slots, w.lease_us, w.lock_mode,
      w.host, w.pid, w.thread, w.label, w.user_name, w.process_id, w.boot_id, w.channel, w.beacon
FROM sqlsem_semaphore m
LEFT JOIN sqlsem_waiter w ON w.semaphore_key = m.name_key AND w.expires_us > {now} AND w.away = %(no)s AND
      (%(witness)s = %(no)s OR NOT (w.beacon AND (CASE WHEN CHAR_LENGTH(w.process_id) = 32 THEN
      IS_FREE_LOCK(CONCAT('sqlsem:', w.process_id)) <=> 1 ELSE FALSE END)))
WHERE m.name_key = %(key)s
ORDER BY w.queued_us, w.id;

-- handoff.PASS
UPDATE sqlsem_slot
SET held_us = CASE WHEN {now} <= acquired_us THEN held_us WHEN held_us = 0 THEN {now} - acquired_us ELSE held_us +
      ({now} - acquired_us - held_us) / 8 END, suspect_us = NULL, token = %(token)s, permit_id = %(permit_id)s,
      acquired_us = {now}, expires_us = {now} + %(lasts_us)s, lease_us = %(lease_us)s, lock_mode = %(lock_mode)s,
      host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id
      = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND id = %(row0)s AND permit_id = %(released)s AND closed = %(no)s;

-- let the dead run out
UPDATE sqlsem_slot
SET expires_us = {now}
WHERE suspect_us <= {now} - %(out_for_us)s AND semaphore_key = %(key)s AND expires_us > {now} AND beacon AND (CASE
      WHEN CHAR_LENGTH(process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', process_id)) <=> 1 ELSE FALSE END) AND
      NOT (CASE WHEN CHAR_LENGTH(%(process_id)s) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', %(process_id)s)) <=> 1
      ELSE FALSE END);

-- look
SELECT m.kind, m.declared_slots, CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, CASE WHEN
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now}))
      THEN 0 ELSE 1 END, (SELECT COUNT(*)
  FROM sqlsem_slot s
  WHERE s.semaphore_key = %(key)s AND s.slot > 0), (SELECT COUNT(*)
  FROM (SELECT DISTINCT s.process_id, s.beacon
    FROM sqlsem_slot s
    WHERE s.semaphore_key = %(key)s AND s.expires_us > {now}) d
  WHERE d.beacon AND (CASE WHEN CHAR_LENGTH(d.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', d.process_id))
      <=> 1 ELSE FALSE END)) + (SELECT COUNT(*)
  FROM sqlsem_slot x
  WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now} AND x.fenced = x.token), CASE WHEN (m.paused = %(no)s OR
      m.paused_until_us <= {now}) AND EXISTS (SELECT 1
  FROM sqlsem_slot f
  WHERE f.semaphore_key = %(key)s AND f.closed = %(no)s AND f.slot BETWEEN 1 AND COALESCE(CASE WHEN m.slots_until_us
      <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s, m.declared_slots) AND (f.expires_us IS NULL OR
      (f.expires_us <= {now} AND f.lease_us <= ABS({now} - %(since)s) AND (f.fenced IS NULL OR f.fenced <>
      f.token)))) THEN CASE WHEN m.kind = 'mutex' AND NOT EXISTS (SELECT 1
  FROM sqlsem_slot l
  WHERE l.semaphore_key = %(key)s AND l.lock_mode = 'mutex') THEN 3 WHEN EXISTS (SELECT 1
  FROM sqlsem_waiter d
  WHERE d.semaphore_key = %(key)s AND d.away = %(no)s) THEN 1 ELSE 2 END ELSE 0 END
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s;

-- look around 0
SELECT (SELECT COUNT(*)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND sqlsem_waiter.lock_mode <>
      'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us OR (w.queued_us = sqlsem_waiter.queued_us AND w.id <
      sqlsem_waiter.id))), v.free_slots, v.expiry_us, v.strangers, CASE WHEN (SELECT COUNT(*)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND sqlsem_waiter.lock_mode <>
      'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us OR (w.queued_us = sqlsem_waiter.queued_us AND w.id <
      sqlsem_waiter.id))) = 0 THEN (SELECT COUNT(*)
  FROM (SELECT DISTINCT s.process_id, s.beacon
    FROM sqlsem_slot s
    WHERE s.semaphore_key = %(key)s AND s.expires_us > {now}) d
  WHERE d.beacon AND (CASE WHEN CHAR_LENGTH(d.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', d.process_id))
      <=> 1 ELSE FALSE END)) + (SELECT COUNT(*)
  FROM sqlsem_slot x
  WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now} AND x.fenced = x.token) ELSE 0 END, v.kind
FROM (SELECT SUM(CASE WHEN (s.closed = %(no)s OR (m.operator_slots IS NOT NULL AND m.slots_until_us <= {now})) AND
      s.slot <= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <= ABS({now} - %(since)s)
      AND (s.fenced IS NULL OR s.fenced <> s.token))) THEN 1 ELSE 0 END) AS free_slots, MIN(CASE WHEN s.expires_us >
      {now} THEN s.expires_us - {now} END) AS expiry_us, SUM(CASE WHEN s.expires_us > {now} AND s.channel NOT LIKE
      %(near)s THEN 1 ELSE 0 END) AS strangers, MIN(m.kind) AS kind
  FROM sqlsem_semaphore m
  JOIN sqlsem_slot s ON s.semaphore_key = m.name_key
  WHERE m.name_key = %(key)s) v, sqlsem_waiter
WHERE sqlsem_waiter.semaphore_key = %(key)s AND sqlsem_waiter.ticket = %(permit_id)s;

-- look bounded
SELECT m.kind, m.declared_slots, CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, CASE WHEN
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now}))
      THEN 0 ELSE 1 END, (SELECT COUNT(*)
  FROM sqlsem_slot s
  WHERE s.semaphore_key = %(key)s AND s.slot > 0), (SELECT COUNT(*)
  FROM (SELECT DISTINCT s.process_id, s.beacon
    FROM sqlsem_slot s
    WHERE s.semaphore_key = %(key)s AND s.expires_us > {now}) d
  WHERE d.beacon AND (CASE WHEN CHAR_LENGTH(d.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', d.process_id))
      <=> 1 ELSE FALSE END)) + (SELECT COUNT(*)
  FROM sqlsem_slot x
  WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now} AND x.fenced = x.token), CASE WHEN (m.paused = %(no)s OR
      m.paused_until_us <= {now}) AND EXISTS (SELECT 1
  FROM sqlsem_slot f
  WHERE f.semaphore_key = %(key)s AND f.closed = %(no)s AND f.slot BETWEEN 1 AND COALESCE(CASE WHEN m.slots_until_us
      <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s, m.declared_slots) AND (f.expires_us IS NULL OR
      (f.expires_us <= {now} AND f.lease_us <= ABS({now} - %(since)s) AND (f.fenced IS NULL OR f.fenced <>
      f.token)))) THEN CASE WHEN m.kind = 'mutex' AND NOT EXISTS (SELECT 1
  FROM sqlsem_slot l
  WHERE l.semaphore_key = %(key)s AND l.lock_mode = 'mutex') THEN 3 WHEN EXISTS (SELECT 1
  FROM sqlsem_waiter d
  WHERE d.semaphore_key = %(key)s AND d.away = %(no)s) THEN 1 ELSE 2 END ELSE 0 END, CASE WHEN (m.paused = %(no)s OR
      m.paused_until_us <= {now}) THEN 0 ELSE 1 END, m.paused_until_us - {now}, (SELECT SUM(w.waiting)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.process_id <> %(process_id)s),
      (SELECT AVG(h.held_us)
  FROM sqlsem_slot h
  WHERE h.semaphore_key = %(key)s AND h.held_us > 0)
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s;

-- new semaphore
INSERT IGNORE INTO sqlsem_semaphore (name_key, name, kind, template, declared_slots, declared_us, paused, shrinking,
      units)
VALUES (%(key)s, %(name)s, %(kind)s, %(template)s, %(declared)s, {now}, %(no)s, %(no)s, %(units)s);

-- new slot
INSERT IGNORE INTO sqlsem_slot (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon,
      semaphore_key, slot, closed, token, lease_us, held_us, lock_mode, revoked_by, stop_by)
VALUES ('', 0, '', '', '', '', '', '', %(no)s, %(key)s, %(slot)s, %(closed)s, 0, 0, 0, '', '', '');

-- note suspects
UPDATE sqlsem_slot
SET suspect_us = {now}
WHERE (suspect_us IS NULL OR suspect_us > {now}) AND semaphore_key = %(key)s AND expires_us > {now} AND beacon AND
      (CASE WHEN CHAR_LENGTH(process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', process_id)) <=> 1 ELSE FALSE END)
      AND NOT (CASE WHEN CHAR_LENGTH(%(process_id)s) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', %(process_id)s)) <=> 1
      ELSE FALSE END);

-- place
INSERT INTO sqlsem_waiter (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, ticket,
      semaphore_key, queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting)
SELECT %(host)s, %(pid)s, %(thread)s, %(label)s, %(user_name)s, %(process_id)s, %(boot_id)s, %(channel)s,
      %(beacon)s, %(permit_id)s, m.name_key, {now} - %(age_us)s, {now} + %(patience_us)s, %(take)s, %(slots)s,
      %(lease_us)s, %(no)s, %(lock_mode)s, %(waiting)s
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s AND (m.kind = %(kind)s OR (m.kind IN ('semaphore', 'mutex') AND %(kind)s IN ('semaphore',
      'mutex'))) AND COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) >= %(take)s AND EXISTS (SELECT 1
  FROM sqlsem_slot s
  WHERE s.semaphore_key = %(key)s AND s.slot >= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE
      m.operator_slots END, %(slots)s, m.declared_slots));

-- place ranked
INSERT INTO sqlsem_waiter (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, ticket,
      semaphore_key, queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting)
SELECT %(host)s, %(pid)s, %(thread)s, %(label)s, %(user_name)s, %(process_id)s, %(boot_id)s, %(channel)s,
      %(beacon)s, %(permit_id)s, m.name_key, COALESCE(a.queued_us, {now} - %(age_us)s), {now} + %(patience_us)s,
      %(take)s, %(slots)s, %(lease_us)s, %(no)s, %(lock_mode)s, %(waiting)s
FROM sqlsem_semaphore m
LEFT JOIN sqlsem_waiter a ON a.semaphore_key = m.name_key AND a.ticket = %(rank)s
WHERE m.name_key = %(key)s AND (m.kind = %(kind)s OR (m.kind IN ('semaphore', 'mutex') AND %(kind)s IN ('semaphore',
      'mutex'))) AND COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) >= %(take)s AND EXISTS (SELECT 1
  FROM sqlsem_slot s
  WHERE s.semaphore_key = %(key)s AND s.slot >= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE
      m.operator_slots END, %(slots)s, m.declared_slots));

-- place unless free
INSERT INTO sqlsem_waiter (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, ticket,
      semaphore_key, queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting)
SELECT %(host)s, %(pid)s, %(thread)s, %(label)s, %(user_name)s, %(process_id)s, %(boot_id)s, %(channel)s,
      %(beacon)s, %(permit_id)s, m.name_key, {now} - %(age_us)s, {now} + %(patience_us)s, %(take)s, %(slots)s,
      %(lease_us)s, %(no)s, %(lock_mode)s, %(waiting)s
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s AND (m.kind = %(kind)s OR (m.kind IN ('semaphore', 'mutex') AND %(kind)s IN ('semaphore',
      'mutex'))) AND COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) >= %(take)s AND EXISTS (SELECT 1
  FROM sqlsem_slot s
  WHERE s.semaphore_key = %(key)s AND s.slot >= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE
      m.operator_slots END, %(slots)s, m.declared_slots)) AND NOT (m.paused = %(no)s AND (m.shrinking = %(no)s AND
      (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})) AND EXISTS (SELECT 1
  FROM sqlsem_slot f
  WHERE f.semaphore_key = %(key)s AND f.closed = %(no)s AND f.slot > (SELECT COALESCE(MAX(CASE WHEN w.take = 0 OR
      w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE WHEN n.slots_until_us <= {now} THEN NULL ELSE
      n.operator_slots END, w.slots, n.declared_slots) THEN COALESCE(CASE WHEN n.slots_until_us <= {now} THEN NULL
      ELSE n.operator_slots END, w.slots, n.declared_slots) END), 0)
    FROM sqlsem_semaphore n
    JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
    WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update') AND f.slot
      <= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) AND (f.expires_us IS NULL OR (f.expires_us <= {now} AND f.lease_us <= ABS({now} - %(since)s)
      AND (f.fenced IS NULL OR f.fenced <> f.token)))));

-- queue.BACK
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(rank)s;

-- queue.BEFORE
SELECT COUNT(*)
FROM sqlsem_waiter w
WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.ticket <> %(rank)s AND w.queued_us < COALESCE((SELECT
      a.queued_us
  FROM sqlsem_waiter a
  WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s), {now});

-- queue.FIND
SELECT 1
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(rank)s;

-- queue.GO_AWAY
INSERT INTO sqlsem_waiter (host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, ticket,
      semaphore_key, queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting)
VALUES (%(host)s, %(pid)s, %(thread)s, %(label)s, %(user_name)s, %(process_id)s, %(boot_id)s, '', %(no)s, %(rank)s,
      %(key)s, {now}, {now} + %(away_us)s, %(take)s, %(slots)s, %(lease_us)s, %(yes)s, %(lock_mode)s, 1);

-- queue.HAND_ON
UPDATE sqlsem_waiter
SET ticket = %(heir)s
WHERE semaphore_key = %(key)s AND ticket = %(rank)s;

-- queue.LEAVE
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND ticket = %(permit_id)s;

-- queue.MINE
SELECT id, slot, token, expires_us - {now}
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s
ORDER BY slot;

-- queue.STAY
UPDATE sqlsem_waiter
SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s, channel = %(channel)s, beacon = %(beacon)s
WHERE sqlsem_waiter.semaphore_key = %(key)s AND sqlsem_waiter.ticket = %(permit_id)s;

-- queue.STILL_AWAY
UPDATE sqlsem_waiter
SET expires_us = {now} + %(away_us)s
WHERE semaphore_key = %(key)s AND ticket = %(rank)s;

-- queue.SWEEP
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND (expires_us < {now} - %(patience_us)s * 4);

-- reading.HOLDERS
SELECT host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, id, semaphore_key, slot, closed,
      token, permit_id, acquired_us, expires_us, lease_us, held_us, suspect_us, session_id, session_us, lock_mode,
      fenced, revoked_token, revoked_by, stop_token, stop_by
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL
ORDER BY slot;

-- reading.SEMAPHORE
SELECT name_key, name, kind, template, declared_slots, declared_us, other_slots, other_us, operator_slots,
      slots_until_us, slots_by, slots_reason, paused, paused_us, paused_until_us, paused_by, paused_reason,
      shrinking, units
FROM sqlsem_semaphore
WHERE name_key = %(key)s;

-- reading.USUAL
SELECT (SELECT AVG(held_us)
  FROM sqlsem_slot
  WHERE semaphore_key = %(key)s AND held_us > 0), (SELECT COUNT(*)
  FROM sqlsem_waiter
  WHERE semaphore_key = %(key)s AND expires_us > {now} AND away = %(yes)s), (SELECT SUM(take)
  FROM sqlsem_waiter
  WHERE semaphore_key = %(key)s AND NOT (expires_us > {now}) AND away = %(yes)s), (SELECT MAX(CASE WHEN boot_id =
      %(boot_id)s THEN acquired_us WHEN acquired_us IS NOT NULL THEN 0 END)
  FROM sqlsem_slot
  WHERE semaphore_key = %(key)s);

-- reading.WAITERS
SELECT host, pid, thread, label, user_name, process_id, boot_id, channel, beacon, id, ticket, semaphore_key,
      queued_us, expires_us, take, slots, lease_us, away, lock_mode, waiting
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND expires_us > {now} AND away = %(no)s
ORDER BY queued_us, id;

-- renewal.EXTEND
UPDATE sqlsem_slot
SET expires_us = {now} + lease_us, beacon = %(beacon)s, suspect_us = NULL
WHERE id IN ({rows}) AND permit_id IN ({permits}) AND expires_us IS NOT NULL;

-- renewal.TELL
SELECT id, permit_id, CASE WHEN stop_token = token THEN stop_by END
FROM sqlsem_slot
WHERE id IN ({rows}) AND permit_id IN ({permits}) AND expires_us IS NOT NULL;

-- renewal.TELL_UNLOCKED
SELECT id, permit_id, CASE WHEN stop_token = token THEN stop_by END
FROM sqlsem_slot
WHERE id IN ({rows}) AND permit_id IN ({permits}) AND expires_us IS NOT NULL
FOR UPDATE SKIP LOCKED;

-- statements.COUNT_LIVE
SELECT COUNT(CASE WHEN slot > 0 AND expires_us > {now} THEN 1 END), COUNT(CASE WHEN slot > %(bound)s AND expires_us
      > {now} THEN 1 END), COUNT(CASE WHEN lock_mode = 'whole' THEN 1 END)
FROM sqlsem_slot
WHERE semaphore_key = %(key)s AND expires_us IS NOT NULL;

-- statements.DISCARD
UPDATE sqlsem_slot
SET expires_us = NULL, permit_id = NULL, suspect_us = NULL, held_us = CASE WHEN {now} <= acquired_us THEN held_us
      WHEN held_us = 0 THEN {now} - acquired_us ELSE held_us + ({now} - acquired_us - held_us) / 8 END
WHERE semaphore_key = %(key)s AND permit_id = %(permit_id)s;

-- statements.LOCK
SELECT CASE WHEN kind = 'mutex' THEN 1 ELSE CASE WHEN slots_until_us <= {now} THEN NULL ELSE operator_slots END END,
      declared_slots, CASE WHEN (paused = %(no)s OR paused_until_us <= {now}) THEN 0 ELSE 1 END, CASE WHEN
      (shrinking = %(no)s AND (operator_slots IS NULL OR slots_until_us IS NULL OR slots_until_us > {now})) THEN 0
      WHEN slots_until_us <= {now} THEN 2 ELSE 1 END, {now}, kind
FROM sqlsem_semaphore
WHERE name_key = %(key)s
FOR UPDATE;

-- statements.RUN_OUT
SELECT s.id, s.token
FROM sqlsem_slot s
WHERE s.semaphore_key = %(key)s AND s.expires_us IS NOT NULL AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND
      s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token)));

-- stay and look around 0
UPDATE sqlsem_waiter
SET expires_us = {now} + %(patience_us)s, waiting = %(waiting)s, channel = %(channel)s, beacon = %(beacon)s
WHERE sqlsem_waiter.semaphore_key = %(key)s AND sqlsem_waiter.ticket = %(permit_id)s;

-- stay and look around 1
SELECT (SELECT COUNT(*)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND sqlsem_waiter.lock_mode <>
      'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us OR (w.queued_us = sqlsem_waiter.queued_us AND w.id <
      sqlsem_waiter.id))), v.free_slots, v.expiry_us, v.strangers, CASE WHEN (SELECT COUNT(*)
  FROM sqlsem_waiter w
  WHERE w.semaphore_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND sqlsem_waiter.lock_mode <>
      'upgrade' AND (w.queued_us < sqlsem_waiter.queued_us OR (w.queued_us = sqlsem_waiter.queued_us AND w.id <
      sqlsem_waiter.id))) = 0 THEN (SELECT COUNT(*)
  FROM (SELECT DISTINCT s.process_id, s.beacon
    FROM sqlsem_slot s
    WHERE s.semaphore_key = %(key)s AND s.expires_us > {now}) d
  WHERE d.beacon AND (CASE WHEN CHAR_LENGTH(d.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', d.process_id))
      <=> 1 ELSE FALSE END)) + (SELECT COUNT(*)
  FROM sqlsem_slot x
  WHERE x.semaphore_key = %(key)s AND x.expires_us <= {now} AND x.fenced = x.token) ELSE 0 END, v.kind
FROM (SELECT SUM(CASE WHEN (s.closed = %(no)s OR (m.operator_slots IS NOT NULL AND m.slots_until_us <= {now})) AND
      s.slot <= COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots) AND (s.expires_us IS NULL OR (s.expires_us <= {now} AND s.lease_us <= ABS({now} - %(since)s)
      AND (s.fenced IS NULL OR s.fenced <> s.token))) THEN 1 ELSE 0 END) AS free_slots, MIN(CASE WHEN s.expires_us >
      {now} THEN s.expires_us - {now} END) AS expiry_us, SUM(CASE WHEN s.expires_us > {now} AND s.channel NOT LIKE
      %(near)s THEN 1 ELSE 0 END) AS strangers, MIN(m.kind) AS kind
  FROM sqlsem_semaphore m
  JOIN sqlsem_slot s ON s.semaphore_key = m.name_key
  WHERE m.name_key = %(key)s) v, sqlsem_waiter
WHERE sqlsem_waiter.semaphore_key = %(key)s AND sqlsem_waiter.ticket = %(permit_id)s;

-- sweep dead
DELETE
FROM sqlsem_waiter
WHERE semaphore_key = %(key)s AND away = %(no)s AND (expires_us > {now} + %(patience_us)s * 2 OR (%(witness)s <>
      %(no)s AND beacon AND (CASE WHEN CHAR_LENGTH(process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', process_id))
      <=> 1 ELSE FALSE END)));

-- take barge
UPDATE sqlsem_slot
SET suspect_us = CASE WHEN LAST_INSERT_ID(CASE WHEN id = slot + %(gap)s AND (GREATEST(token + 1, {now}) -
      %(years_ago)s) BETWEEN 0 AND 140737488355328 THEN (GREATEST(token + 1, {now}) - %(years_ago)s) * 10001 + slot
      ELSE 0 END) = 0 THEN NULL END, token = CASE WHEN token + 1 > {now} THEN token + 1 ELSE {now} END, permit_id =
      %(permit_id)s, acquired_us = {now}, expires_us = {now} + %(lease_us)s, lease_us = %(lease_us)s, lock_mode =
      %(lock_mode)s, host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name =
      %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND closed = %(no)s AND (expires_us IS NULL OR (expires_us <= {now} AND lease_us <=
      ABS({now} - %(since)s) AND (fenced IS NULL OR fenced <> token))) AND slot > (SELECT COALESCE(MAX(CASE WHEN
      w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE WHEN n.slots_until_us <= {now}
      THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN COALESCE(CASE WHEN n.slots_until_us <=
      {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.take = 0) AND slot <= (SELECT
      COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s, m.declared_slots)
  FROM sqlsem_semaphore m
  WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now}) AND
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})))
ORDER BY semaphore_key, slot LIMIT 1;

-- take newcomer
UPDATE sqlsem_slot
SET suspect_us = CASE WHEN LAST_INSERT_ID(CASE WHEN id = slot + %(gap)s AND (GREATEST(token + 1, {now}) -
      %(years_ago)s) BETWEEN 0 AND 140737488355328 THEN (GREATEST(token + 1, {now}) - %(years_ago)s) * 10001 + slot
      ELSE 0 END) = 0 THEN NULL END, token = CASE WHEN token + 1 > {now} THEN token + 1 ELSE {now} END, permit_id =
      %(permit_id)s, acquired_us = {now}, expires_us = {now} + %(lease_us)s, lease_us = %(lease_us)s, lock_mode =
      %(lock_mode)s, host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name =
      %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND closed = %(no)s AND (expires_us IS NULL OR (expires_us <= {now} AND lease_us <=
      ABS({now} - %(since)s) AND (fenced IS NULL OR fenced <> token))) AND slot > (SELECT COALESCE(MAX(CASE WHEN
      w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE WHEN n.slots_until_us <= {now}
      THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN COALESCE(CASE WHEN n.slots_until_us <=
      {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update') AND slot <=
      (SELECT COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots)
  FROM sqlsem_semaphore m
  WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now}) AND
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})))
ORDER BY semaphore_key, slot LIMIT 1;

-- take newcomer mutex
UPDATE sqlsem_slot
SET suspect_us = CASE WHEN LAST_INSERT_ID(CASE WHEN id = slot + %(gap)s AND (GREATEST(token + 1, {now}) -
      %(years_ago)s) BETWEEN 0 AND 140737488355328 THEN (GREATEST(token + 1, {now}) - %(years_ago)s) * 10001 + slot
      ELSE 0 END) = 0 THEN NULL END, token = CASE WHEN token + 1 > {now} THEN token + 1 ELSE {now} END, permit_id =
      %(permit_id)s, acquired_us = {now}, expires_us = {now} + %(lease_us)s, lease_us = %(lease_us)s, lock_mode =
      %(lock_mode)s, host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name =
      %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND closed = %(no)s AND (expires_us IS NULL OR (expires_us <= {now} AND lease_us <=
      ABS({now} - %(since)s) AND (fenced IS NULL OR fenced <> token))) AND lock_mode = 'mutex' AND slot > (SELECT
      COALESCE(MAX(CASE WHEN w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE WHEN
      n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN COALESCE(CASE
      WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update') AND slot <=
      (SELECT COALESCE(CASE WHEN m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s,
      m.declared_slots)
  FROM sqlsem_semaphore m
  WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now}) AND
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})))
ORDER BY semaphore_key, slot LIMIT 1;

-- take ranked
UPDATE sqlsem_slot
SET suspect_us = CASE WHEN LAST_INSERT_ID(CASE WHEN id = slot + %(gap)s AND (GREATEST(token + 1, {now}) -
      %(years_ago)s) BETWEEN 0 AND 140737488355328 THEN (GREATEST(token + 1, {now}) - %(years_ago)s) * 10001 + slot
      ELSE 0 END) = 0 THEN NULL END, token = CASE WHEN token + 1 > {now} THEN token + 1 ELSE {now} END, permit_id =
      %(permit_id)s, acquired_us = {now}, expires_us = {now} + %(lease_us)s, lease_us = %(lease_us)s, lock_mode =
      %(lock_mode)s, host = %(host)s, pid = %(pid)s, thread = %(thread)s, label = %(label)s, user_name =
      %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s, channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND closed = %(no)s AND (expires_us IS NULL OR (expires_us <= {now} AND lease_us <=
      ABS({now} - %(since)s) AND (fenced IS NULL OR fenced <> token))) AND slot > (SELECT COALESCE(MAX(CASE WHEN
      w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE WHEN n.slots_until_us <= {now}
      THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN COALESCE(CASE WHEN n.slots_until_us <=
      {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update' AND
      w.queued_us < COALESCE((SELECT a.queued_us
    FROM sqlsem_waiter a
    WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s), {now})) AND slot <= (SELECT COALESCE(CASE WHEN
      m.slots_until_us <= {now} THEN NULL ELSE m.operator_slots END, %(slots)s, m.declared_slots)
  FROM sqlsem_semaphore m
  WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now}) AND
      (m.shrinking = %(no)s AND (m.operator_slots IS NULL OR m.slots_until_us IS NULL OR m.slots_until_us > {now})))
ORDER BY semaphore_key, slot LIMIT 1;

-- take two
UPDATE sqlsem_slot
SET suspect_us = NULL, token = %(token)s, permit_id = %(permit_id)s, acquired_us = {now}, expires_us = {now} +
      %(lasts_us)s, lease_us = %(lease_us)s, lock_mode = %(lock_mode)s, host = %(host)s, pid = %(pid)s, thread =
      %(thread)s, label = %(label)s, user_name = %(user_name)s, process_id = %(process_id)s, boot_id = %(boot_id)s,
      channel = %(channel)s, beacon = %(beacon)s
WHERE semaphore_key = %(key)s AND id IN (%(row0)s, %(row1)s);

-- taken
SELECT d.semaphore_key, d.process_id, d.beacon, d.ran_out, CASE WHEN d.beacon AND (CASE WHEN
      CHAR_LENGTH(d.process_id) = 32 THEN IS_FREE_LOCK(CONCAT('sqlsem:', d.process_id)) <=> 1 ELSE FALSE END) THEN 1
      ELSE 0 END
FROM (SELECT DISTINCT s.semaphore_key, s.process_id, s.beacon, CASE WHEN (s.expires_us IS NULL OR (s.expires_us <=
      {now} AND s.lease_us <= ABS({now} - %(since)s) AND (s.fenced IS NULL OR s.fenced <> s.token))) THEN 1 ELSE 0
      END AS ran_out
  FROM sqlsem_slot s
  WHERE s.lease_us > 0 AND s.expires_us IS NOT NULL) d;

-- wanted before barge
SELECT (SELECT COALESCE(MAX(CASE WHEN w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE
      WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN
      COALESCE(CASE WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots)
      END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.take = 0)
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now});

-- wanted before newcomer
SELECT (SELECT COALESCE(MAX(CASE WHEN w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE
      WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN
      COALESCE(CASE WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots)
      END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update')
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now});

-- wanted before ranked
SELECT (SELECT COALESCE(MAX(CASE WHEN w.take = 0 OR w.lock_mode = 'mutex' THEN 10000 WHEN w.take <= COALESCE(CASE
      WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots) THEN
      COALESCE(CASE WHEN n.slots_until_us <= {now} THEN NULL ELSE n.operator_slots END, w.slots, n.declared_slots)
      END), 0)
  FROM sqlsem_semaphore n
  JOIN sqlsem_waiter w ON w.semaphore_key = n.name_key
  WHERE n.name_key = %(key)s AND w.expires_us > {now} AND w.away = %(no)s AND w.lock_mode <> 'update' AND
      w.queued_us < COALESCE((SELECT a.queued_us
    FROM sqlsem_waiter a
    WHERE a.semaphore_key = %(key)s AND a.ticket = %(rank)s), {now}))
FROM sqlsem_semaphore m
WHERE m.name_key = %(key)s AND m.kind = %(kind)s AND (m.paused = %(no)s OR m.paused_until_us <= {now});
