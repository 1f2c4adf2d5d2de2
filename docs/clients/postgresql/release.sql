-- Gives back what is held under a ticket, its place in line too. Prints "released", or "nothing" if nothing was held.
-- Variables: name, ticket. Two statements, each its own transaction: a slot may be handed to us between them.
SELECT left(encode(sha256(convert_to(:'name', 'UTF8')), 'hex'), 32) AS key \gset
DELETE FROM sqlsem_waiter WHERE semaphore_key = :'key' AND ticket = :'ticket';

WITH u AS (
    UPDATE sqlsem_slot SET expires_us = NULL, permit_id = NULL, suspect_us = NULL
    WHERE semaphore_key = :'key' AND permit_id = :'ticket'
    RETURNING 1
)
SELECT CASE WHEN count(*) > 0 THEN 'released' ELSE 'nothing' END FROM u;
