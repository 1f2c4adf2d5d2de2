"""The T-SQL that looks for free slots, and takes them: see ``applock_sql`` for what it is made of."""

from __future__ import annotations

from typing import Final

from django_sqlsem.backends.applock.tsql.fences import behind
from django_sqlsem.backends.applock.tsql.parts import (
    BUSY,
    DONE,
    GATED,
    PAST,
    SEEK,
    available,
    get,
    give,
    holds,
    taken,
)
from django_sqlsem.core.modes import WRITER
from django_sqlsem.database.sqlserver import OWN

#: A waiting head's longest wait for one slot before it looks at the others, in milliseconds.
LAST_STEP_MS: Final = 32
#: Semaphores of so many slots at the most are swept from the first one on; larger ones from a random one.
FEW: Final = 16

#: What patience is left. Each turn costs a millisecond at least, also if the clock is set back meanwhile.
LEFT: Final = """SET @budget = @budget - 1;
            SET @left = @budget - DATEDIFF(MILLISECOND, @began, SYSUTCDATETIME());
            IF @left > @budget SET @left = @budget;"""

#: Others wait: is a slot free all the same? Then the mark tells, at the next look, whether anything moved in between.
#: One that barges yields to a head that wants all slots (``:w``), as that would never see them free at once; so do
#: readers, to one of them that upgrades. A writer also yields to upgradable readers that wait for its place (``:u``).
QUEUE: Final = f"""
IF @status = {DONE} AND {holds("@base")} SET @status = {OWN};
SET @resource = CONCAT(@gate, N':w');
IF @status = {DONE} AND @mode = 'Shared' AND @fair <> {PAST} AND {taken("@resource")} SET @status = {BUSY};
IF @status = {DONE} AND (@fair = 1 AND ({taken("@gate")} OR @place = {WRITER} AND {taken("CONCAT(@gate, N':u')")})
    OR @fair = 0 AND NOT {holds("@gate")} AND {taken("@resource")})
BEGIN
    SELECT @status = {BUSY}, @i = CASE WHEN {available("@base", "@mode")} THEN 1 ELSE @n + 1 END;
    WHILE @i <= @n AND @status = {BUSY}
    BEGIN
        SET @resource = CONCAT(CASE WHEN @place = {WRITER} THEN {WRITER} ELSE @i END, N'-', @base);
        IF NOT {taken("@resource")} SET @status = {GATED};
        SET @i = CASE WHEN @place = {WRITER} THEN @n + 1 ELSE @i + 1 END;
    END;
    -- mark
END;
"""

MARK: Final = f"SELECT @mark = MAX(token) FROM sqlsem_slot {SEEK} WHERE semaphore_key = @key;"

#: After an operator's shrink nothing is granted until fewer are held than there are slots; one caller at a time counts.
SHRINK: Final = f"""
    IF @status = {DONE} AND @place < 0 AND @operator IS NOT NULL AND @top > @n
    BEGIN
        SET @i = @n + 1;
        WHILE @i <= @top
        BEGIN
            SET @resource = CONCAT(@i, N'-', @base);
            IF {taken("@resource")} SET @busy = @busy + 1;
            SET @i = @i + 1;
        END;
        IF @busy > 0
        BEGIN
            SET @resource = CONCAT(@gate, N':s');
            {get("@resource", "Exclusive", "0")}
            IF @rc >= 0 SET @shrinking = 1; ELSE SET @status = {BUSY};
            SET @i = 1;
            WHILE @i <= @n AND @status = {DONE}
            BEGIN
                SET @resource = CONCAT(@i, N'-', @base);
                IF {taken("@resource")} SET @busy = @busy + 1;
                SET @i = @i + 1;
            END;
            IF @busy + @take > @n SET @status = {BUSY};
            SET @budget = 0;
        END;
    END;
"""

#: Whoever wants the writer's place takes it first: so only who has it ever asks for the name in a mode that keeps
#: others out, and one that gives up being the writer can have the name as an upgradable reader at once.
_PLACE: Final = f"""
    IF @place = {WRITER}
    BEGIN
        SELECT @slot = @place, @resource = CONCAT(@place, N'-', @base);
        {get("@resource", "Exclusive", "@budget")}
        IF @rc >= 0 SELECT @csv = CONCAT(@csv, @place, N','), @count = 1;
        ELSE SET @status = CASE WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
        IF @rc = 1 SET @waited = 1;
        {LEFT}
        SET @budget = CASE WHEN @left > 0 THEN @left ELSE 0 END;
        SET @began = SYSUTCDATETIME();
    END;
"""

#: Try every slot without waiting, from a random one on; then wait for one of them for a moment, and so on. ``place``:
#: the only slot that is tried, for who has the name itself alone, or the writer's place; as the head that wants all of
#: them it says so, by ``:w``.
SWEEP: Final = f"""
IF @status = {DONE}
BEGIN
    SET @resource = CONCAT(@gate, N':w');
    IF @place >= 0 AND @mode = 'Exclusive' AND {holds("@gate")} AND NOT {holds("@resource")}
    BEGIN
        {get("@resource", "Exclusive", "0")}
    END;
    {_PLACE.strip()}
    IF @status = {DONE}
    BEGIN
        {get("@base", "@mode", "@budget")}
        IF @rc >= 0 SET @intent = 1; ELSE SET @status = CASE WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
        IF @rc = 1 SET @waited = 1;
    END;
    IF @status = {DONE} AND @count > 0
    BEGIN
        SET @resource = CONCAT(@place, N'-', @base);
        {behind("@budget")}
        IF @rc < 0 SELECT @csv = N',', @count = 0, @status = CASE WHEN @rc = -1 THEN {BUSY} ELSE @rc END;
    END;
    IF @n <= {FEW} SET @start = 0;
    SET @m = CASE WHEN @place < 0 THEN @n ELSE 1 END;
    -- shrink
    WHILE @status = {DONE} AND @count < @take
    BEGIN
        SELECT @i = 0, @last = 0;
        WHILE @i < @m AND @count < @take AND @status = {DONE}
        BEGIN
            SET @slot = CASE WHEN @place < 0 THEN (@start + @i) % @m + 1 ELSE @place END;
            IF CHARINDEX(CONCAT(N',', @slot, N','), @csv) = 0
            BEGIN
                SET @resource = CONCAT(@slot, N'-', @base);
                {get("@resource", "Exclusive", "0")}
                {behind("0")}
                IF @rc >= 0 SELECT @csv = CONCAT(@csv, @slot, N','), @count = @count + 1;
                ELSE IF @rc = -1 SET @last = @slot + 1;
                ELSE SET @status = @rc;
            END;
            SET @i = @i + 1;
        END;
        IF @count < @take AND @status = {DONE}
        BEGIN
            {LEFT}
            IF @left <= 0 OR @last = 0
                SET @status = {BUSY};
            ELSE
            BEGIN
                IF @m > 1 AND @left > @step SET @left = @step;
                SELECT @slot = @last - 1, @resource = CONCAT(@last - 1, N'-', @base);
                {get("@resource", "Exclusive", "@left")}
                {behind("@left")}
                IF @rc >= 0 SELECT @csv = CONCAT(@csv, @slot, N','), @count = @count + 1, @waited = 1;
                ELSE IF @rc <> -1 SET @status = @rc;
                SELECT @start = @start + 1, @step = CASE WHEN @step * 2 < {LAST_STEP_MS} THEN @step * 2
                    ELSE {LAST_STEP_MS} END;
            END;
        END;
    END;
END;
"""

#: The gate opens for the next in line.
OPEN: Final = f"""IF @status = {DONE} AND {holds("@gate")}
BEGIN
    {give("@gate")}
END;
"""

#: All or nothing: what was got goes back unless everything was; and the gate opens for the next in line if it was.
END: Final = f"""
IF @status <> {DONE}
BEGIN
    SET @rest = SUBSTRING(@csv, 2, LEN(@csv));
    WHILE CHARINDEX(N',', @rest) > 0
    BEGIN
        SET @resource = CONCAT(LEFT(@rest, CHARINDEX(N',', @rest) - 1), N'-', @base);
        SET @rest = SUBSTRING(@rest, CHARINDEX(N',', @rest) + 1, LEN(@rest));
        {give("@resource")}
    END;
    IF @intent = 1
    BEGIN
        {give("@base")}
    END;
END;
IF @shrinking = 1
BEGIN
    SET @resource = CONCAT(@gate, N':s');
    {give("@resource")}
END;
SET @resource = CONCAT(@gate, N':w');
IF (@status = {DONE} OR @place < 0) AND {holds("@resource")}
BEGIN
    {give("@resource")}
END;
SET @resource = CONCAT(@gate, N':u');
IF @status = {DONE} AND {holds("@resource")}
BEGIN
    {give("@resource")}
END;
{OPEN}"""
