-- Extends the lease of what is held under a ticket. Prints "held", or "lost": then stop the work at once.
-- Variables: @name, @ticket.
UPDATE sqlsem_slot
SET expires_us = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + lease_us, suspect_us = NULL
WHERE semaphore_key = LEFT(SHA2(CONVERT(@name USING utf8mb4), 256), 32)
    AND permit_id = @ticket AND expires_us IS NOT NULL;
SELECT IF(ROW_COUNT() > 0, 'held', 'lost') AS answer;
