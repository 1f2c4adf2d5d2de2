-- Extends the lease of what is held under a ticket. Prints "held", or "lost": then stop the work at once.
-- Variables: name, ticket.
WITH u AS (
    UPDATE sqlsem_slot
    SET expires_us = (date_part('epoch', statement_timestamp()) * 1000000)::bigint + lease_us, suspect_us = NULL
    WHERE semaphore_key = left(encode(sha256(convert_to(:'name', 'UTF8')), 'hex'), 32)
        AND permit_id = :'ticket' AND expires_us IS NOT NULL
    RETURNING 1
)
SELECT CASE WHEN count(*) > 0 THEN 'held' ELSE 'lost' END FROM u;
