"""The T-SQL of a proof of possession: a session still is the one that we opened, and still has its locks."""

from __future__ import annotations

import functools
from typing import Final

from django_sqlsem.backends.applock.tsql.parts import ROW_PATIENCE_MS, SEEK, Batch, holds

#: How long a proof of possession waits for rows, in milliseconds: what it reads there is not urgent.
_WISH_PATIENCE_MS: Final = 100


@functools.cache
def prove(resources: int, permits: int = 0) -> Batch:
    """Ask whether the session is the one that we opened, and still has these locks.

    Of so many permits also by whom their holders were asked to stop, as ``asked0`` and so on: NULL if they were not, or
    their rows are locked at this moment.
    """
    held = "".join(f" + CASE WHEN {holds('?')} THEN 0 ELSE 1 END" for _ in range(resources))
    wishes = "".join(
        f"\nDECLARE @asked{number} nvarchar(300) = NULL, @key{number} nvarchar(32) = ?, @slot{number} int = ?,"
        f" @permit{number} nvarchar(32) = ?;\nBEGIN TRY SELECT @asked{number} = stop_by FROM sqlsem_slot"
        f" {SEEK} WHERE semaphore_key = @key{number} AND slot = @slot{number} AND permit_id = @permit{number}"
        f" AND stop_token = token; END TRY BEGIN CATCH SET @asked{number} = NULL; END CATCH;"
        for number in range(permits)
    )
    if permits:
        wishes = f"\nSET LOCK_TIMEOUT {_WISH_PATIENCE_MS};{wishes}\nSET LOCK_TIMEOUT {ROW_PATIENCE_MS};"
    told = "".join(f", @asked{number} AS asked{number}" for number in range(permits))
    about = tuple(f"{what}{number}" for number in range(permits) for what in ("key", "slot", "permit"))
    return Batch(
        f"SET NOCOUNT ON;\nDECLARE @stamp varchar(60) = ?;{wishes}\n"
        "SELECT CASE WHEN CAST(SUBSTRING(CONTEXT_INFO(), 1, DATALENGTH(@stamp)) AS varchar(60)) = @stamp THEN 0"
        f" ELSE 1000000 END{held} AS missing{told};\n",
        ("stamp", *about, *(f"resource{number}" for number in range(resources))),
    )
