"""The T-SQL of fences: what a fenced transaction holds, and how whoever takes a slot stands behind it.

A transaction that is fenced with a permit has two application locks of its own, besides those of the permit's session:
the *fence* of the name, in mode IntentShared, or Shared if the permit has all slots; and unless it has, the fence of
each of its slots, in mode Shared. Whoever gets a slot looks at them afterwards, and who fences looks afterwards
whether the session still has the slot: one of the two sees the other.
"""

from __future__ import annotations

from typing import Final

from django_sqlsem.backends.applock.tsql.parts import get, give, taken
from django_sqlsem.database.sqlserver import DIGEST_UNITS, FENCE, GATE

#: The fence of a name whose gate is known: also that of its writers' and upgradable readers' line.
OF_GATE: Final = f"CONCAT(N'{FENCE}', SUBSTRING(@gate, {len(GATE) + 1}, {DIGEST_UNITS}))"


def behind(timeout: str, *, shared: bool = False) -> str:
    """Return what follows the grant of ``@slot``, the lock in ``@resource``: wait for the fences before it.

    If that takes longer than ``timeout`` the slot goes back, and ``@rc`` says that it was not granted. Nobody alive
    has these fences: the slot is ours, and so are all, if the name is held in mode Exclusive. ``shared``: it is not.
    """
    through = "SET @through = CASE WHEN @mode = 'Exclusive' THEN 'Exclusive' ELSE 'IntentExclusive' END;\n    "
    return f"""
IF @rc >= 0 AND {taken("@fence")}
BEGIN
    {"" if shared else through}{get("@fence", "IntentExclusive" if shared else "@through", timeout)}
    IF @rc >= 0
    BEGIN
        {give("@fence")}
    END;
    IF @rc >= 0{"" if shared else " AND @through <> 'Exclusive'"}
    BEGIN
        SET @post = CONCAT(@fence, N':', @slot);
        {get("@post", "Exclusive", timeout)}
        IF @rc >= 0
        BEGIN
            {give("@post")}
        END;
    END;
    IF @rc < 0
    BEGIN
        {give("@resource")}
    END;
END;
"""


#: On the caller's connection, in the transaction that is fenced: the name's fence in a mode, and those of the slots in
#: ``csv``. It begins with a look at a table: an implicit transaction begins with that, and not with a lock. Whatever
#: it finds: so it waits for nobody's row, and keeps none locked.
HOLD: Final = """SET NOCOUNT ON;
DECLARE @fence nvarchar(60) = %s, @mode varchar(32) = %s, @csv nvarchar(max) = %s, @patience int = %s, @rc int = 0,
    @post nvarchar(255), @row nvarchar(32);
SELECT TOP (1) @row = name_key FROM sqlsem_semaphore WITH (NOLOCK);
EXEC @rc = sys.sp_getapplock @Resource = @fence, @LockMode = @mode, @LockOwner = 'Transaction',
    @LockTimeout = @patience, @DbPrincipal = 'public';
WHILE @rc >= 0 AND CHARINDEX(N',', @csv) > 0
BEGIN
    SET @post = CONCAT(@fence, N':', LEFT(@csv, CHARINDEX(N',', @csv) - 1));
    SET @csv = SUBSTRING(@csv, CHARINDEX(N',', @csv) + 1, LEN(@csv));
    EXEC @rc = sys.sp_getapplock @Resource = @post, @LockMode = 'Shared', @LockOwner = 'Transaction',
        @LockTimeout = @patience, @DbPrincipal = 'public';
END;
SELECT @rc AS rc;
SET NOCOUNT OFF;
"""
