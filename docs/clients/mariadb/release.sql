-- Gives back what is held under a ticket, its place in line too. Prints "released", or "nothing" if nothing was held.
-- Variables: @name, @ticket. Two statements, each its own transaction: a slot may be handed to us between them.
DELETE FROM sqlsem_waiter WHERE ticket = @ticket;

UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL
WHERE semaphore_key = LEFT(SHA2(CONVERT(@name USING utf8mb4), 256), 32) AND permit_id = @ticket;
SELECT IF(ROW_COUNT() > 0, 'released', 'nothing') AS answer;
