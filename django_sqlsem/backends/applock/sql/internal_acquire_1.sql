-- Take slots of a name for this session: all that are wanted, or none. The whole wait is this one call.
--
-- Locks, all owned by the session: the name itself, @base, in @mode; '<slot>-<name>' for each slot; and, while it
-- waits as the first in line, the gate. Who finds the gate closed waits for it in the server, first come, first served.
-- Programs may go by different numbers of slots, where no operator has set one. Who goes by fewer than the largest has
-- a gate of its own, '<gate>:<slots>': as the first of all it would keep the others from slots that it cannot use.
-- @session tells when it began, in microseconds, its process's number (20 digits each), identity (32) and host.
-- Arguments of sp_getapplock in its own order: resource, mode, owner, milliseconds, principal.
--
-- @result: 0 at once; 1 after waiting; -1 nothing became free in time; -2 cancelled; -3 deadlock; -4 paused; -5 an
-- operator has left fewer slots than are wanted; -10 rows are missing: call internal_declare_1, with @bound slots; -11
-- the name belongs to another kind of lock, @why; -12 more are wanted than there are; -14 a row could not be written,
-- @error and @why. Below 0 nothing of the name is held.
CREATE OR ALTER PROCEDURE sqlsem.internal_acquire_1
    @base nvarchar(255),
    @key nvarchar(32),
    @kind nvarchar(16),
    @slots int,                              -- how many there are; 0: as declared elsewhere
    @permit nvarchar(32) = NULL,             -- NULL: without rows
    @thread nvarchar(200) = NULL,
    @label nvarchar(400) = NULL,
    @user nvarchar(300) = NULL,
    @session nvarchar(600) = NULL,
    @lock_mode nvarchar(8) = N'',            -- 'whole': all slots, alone; 'update': a reader that may become the writer
    @take int = 1,
    @timeout int = 0,                        -- milliseconds; NULL: for ever
    @fair int = 1,                           -- 0: the first try passes those who wait; 2: so it does if @mark still holds
    @look int = NULL,                        -- milliseconds at the gate before one look past it; NULL: none
    @keep bit = 1,                           -- 1: the first in line keeps the gate while an operator's pause lasts
    @head bit = 0 OUTPUT,                    -- whether the session has the gate
    @mark bigint = NULL OUTPUT,              -- the newest token of the name: it changes with every grant
    @result int = NULL OUTPUT,
    @taken nvarchar(max) = NULL OUTPUT,      -- ',3,7,'
    @token bigint = NULL OUTPUT,
    @bound int = NULL OUTPUT,
    @waited_ms int = NULL OUTPUT,
    @error int = NULL OUTPUT,
    @why nvarchar(2048) = NULL OUTPUT,
    @answer bit = 0                          -- 1: the answers also as a row
AS
SET NOCOUNT ON;
DECLARE @gate nvarchar(255) = CONCAT(N'sqlsem:g:', LEFT(@key, 20)), @own nvarchar(255) = N'',
    @largest int = 0, @fewest int = 0, @low int = 0,
    -- An hour ago: for so long it counts what programs have said.
    @lately bigint = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME()) - 3600000000,
    @fence nvarchar(60) = CONCAT(N'sqlsem:f:', LEFT(@key, 20)), @resource nvarchar(255) = N'',
    @mode varchar(32) = CASE WHEN @lock_mode = N'whole' OR @kind IN (N'rlock', N'mutex') THEN 'Exclusive'
        WHEN @lock_mode = N'update' THEN 'Update' WHEN @kind = N'rwlock' THEN 'Shared' ELSE 'IntentExclusive' END,
    -- The very slot that is taken; NULL: any.
    @place int = CASE WHEN @lock_mode = N'' THEN NULL WHEN @kind = N'rwlock' THEN 0 ELSE 1 END,
    @record bit = CASE WHEN @permit IS NULL THEN 0 ELSE 1 END, @write bit, @began datetime2(3) = SYSUTCDATETIME(),
    @ms bigint = 0, @spent bigint = 0, @led bigint = 0, @left int = COALESCE(@timeout, 2147483647),
    @seen nvarchar(16), @operator int, @declared int, @noted bigint, @paused bit = 0, @top int = 0, @newest bigint,
    @turn int = 0, @looked bigint = 0, @chosen bigint = 0, @waited bit = 0,
    @may bit, @past bit = 0, @placed bit = 0, @named bit = 0, @full bit = 0, @most int, @some bit, @swept bigint = 0,
    @start int, @count int = 0, @least int = 2147483647, @greatest int = -1, @busy int = 0, @i int, @try int = 0,
    @wait int, @step int = 0, @rc int, @done int, @bad int = 0, @strikes int = 0, @now bigint, @gone bit,
    @refused nvarchar(255) = N'', @refused_mode varchar(32) = 'Exclusive';
SET @own = @gate;                            -- the one at which this call stands
SELECT @result = NULL, @taken = N',', @token = NULL, @bound = CASE WHEN @slots > 0 THEN @slots ELSE 1 END;
-- In a caller's transaction rows would stay locked.
SET @write = CASE WHEN @@TRANCOUNT = 0 THEN @record ELSE 0 END;
-- The slot that is tried last, counted from 0. A few slots are tried from the first on: so their numbers stay low.
SET @start = CASE WHEN @bound > 16 THEN CAST(RAND() * @bound AS int) ELSE -1 END;

BEGIN TRY
    WHILE @result IS NULL
    BEGIN
        -- 1. The time that is left, by a clock that may be set: what was waited out counts in any case.
        IF @turn > 0
        BEGIN
            SET @ms = DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME());
            IF @ms < @spent SET @ms = @spent;
            IF @timeout IS NOT NULL SET @left = CASE WHEN @ms >= @timeout THEN 0 ELSE @timeout - @ms END;
            IF @bad IN (-2, -999) OR @strikes >= 3 OR (@bad = -3 AND (@bound = 1 OR @place IS NOT NULL))
                SET @result = @bad;
            ELSE IF @left = 0 AND @past = 0 AND @count < @take SET @result = -1;
            IF @result IS NOT NULL BREAK;
        END;

        -- 2. The rows, before any lock: a table that is missing ends a procedure without its CATCH. Then every 50 ms.
        IF @record = 1 AND (@turn = 0 OR @ms - @looked >= 50)
        BEGIN
            SELECT @seen = kind, @declared = declared_slots, @noted = COALESCE(other_us, 0),
                -- A number of slots or a pause with an end is over when that has passed.
                @operator = CASE WHEN slots_until_us <= DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())
                    THEN NULL ELSE operator_slots END,
                @paused = CASE WHEN paused = 1 AND (paused_until_us IS NULL OR paused_until_us
                    > DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())) THEN 1 ELSE 0 END,
                @top = (SELECT MAX(slot) FROM dbo.sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = @key),
                @fewest = CASE WHEN other_slots < declared_slots AND other_us > @lately THEN other_slots
                    ELSE declared_slots END,
                @largest = CASE WHEN other_slots > declared_slots AND other_us > @lately THEN other_slots
                    ELSE declared_slots END
            FROM dbo.sqlsem_semaphore WITH (FORCESEEK) WHERE name_key = @key OPTION (KEEPFIXED PLAN);
            -- A mutex has one slot, whatever number an operator gave it while it was a semaphore.
            IF @kind = N'mutex' SET @operator = NULL;
            IF @operator IS NOT NULL OR @mode <> 'IntentExclusive' SELECT @fewest = 0, @largest = 0;
            SELECT @bound = COALESCE(@operator, CASE WHEN @slots > 0 THEN @slots ELSE COALESCE(@declared, 1) END),
                @looked = @ms;
            SET @result = CASE
                WHEN @seen IS NULL OR @top IS NULL THEN CASE WHEN @write = 1 THEN -10 END
                -- The modes of the name keep a mutex alone, and let a semaphore's holders in beside one another.
                WHEN @seen <> @kind AND NOT (@seen IN (N'semaphore', N'mutex') AND @kind IN (N'semaphore', N'mutex'))
                    THEN -11
                WHEN @take > @bound AND (@operator IS NULL
                    OR @take > CASE WHEN @slots > 0 THEN @slots ELSE @declared END) THEN -12
                WHEN @top < @bound AND @write = 1 THEN -10
                WHEN @paused = 1 THEN -4
                WHEN @take > @bound THEN -5 END;
        END
        ELSE IF @record = 0 AND @take > @bound SET @result = -12;
        -- What a long wait has brought is ours only now: an operator may have said something meanwhile.
        IF @result IS NULL AND @count >= @take SET @result = 1;
        IF @result IS NOT NULL BREAK;

        -- Who goes by fewer than others leaves the gate of the name to them, and takes nothing along.
        IF @head = 0 SET @own = @gate;
        IF @bound < @largest AND @own = @gate
        BEGIN
            IF @named = 1
            BEGIN
                EXEC sqlsem.internal_release_1 @base, @least, @greatest, @answer = 0;
                SELECT @taken = N',', @named = 0, @count = 0, @least = 2147483647, @greatest = -1;
            END;
            IF @head = 1 EXEC @done = sys.sp_releaseapplock @gate, 'Session', 'public';
            SET @own = CONCAT(@gate, N':', @bound);
            -- A call that was cancelled may have left it closed.
            SET @head = CASE APPLOCK_MODE(N'public', @own, N'Session') WHEN N'NoLock' THEN 0 ELSE 1 END;
        END;

        -- 3. After an operator's shrink nothing is granted until fewer are held. The first in line counts.
        IF @operator < @top AND @place IS NULL
        BEGIN
            SELECT @busy = 0, @i = @top;
            WHILE @i > @bound OR (@i > 0 AND @busy > 0 AND @head = 1)
            BEGIN
                SET @resource = CONCAT(@i, N'-', @base);
                IF APPLOCK_TEST(N'public', @resource, N'Exclusive', N'Session') = 0
                    SELECT @busy = @busy + 1, @try = @i;
                SET @i = @i - 1;
            END;
            SET @full = CASE WHEN @head = 1 AND @busy > 0 AND @busy + @take > @bound THEN 1 ELSE 0 END;
        END
        ELSE SELECT @busy = 0, @full = 0;

        -- 4. The line. An upgradable reader stands in none, as it keeps no readers out: it waits for its place.
        SELECT @may = 1, @low = 0, @rc = 0;
        IF @turn = 0 AND @fair = 1 AND @head = 0 AND @fewest BETWEEN 1 AND @bound - 1 AND @own = @gate
        BEGIN
            -- Whoever waits at the gate goes by no more than the largest number, and may not know of a larger one.
            IF @largest < @bound AND APPLOCK_TEST(N'public', @gate, N'Exclusive', N'Session') = 0
            BEGIN
                SET @low = @largest;
                BEGIN TRY
                    IF @write = 1 AND @slots > @largest
                        UPDATE m SET other_slots = declared_slots, other_us = @lately + 3600000000,
                            declared_slots = @slots, declared_us = @lately + 3600000000
                        FROM dbo.sqlsem_semaphore AS m WITH (ROWLOCK, FORCESEEK)
                        WHERE name_key = @key AND declared_slots < @slots OPTION (KEEPFIXED PLAN);
                END TRY
                BEGIN CATCH
                    SET @done = 0;           -- somebody else says so sooner or later
                END CATCH;
            END
            ELSE
            BEGIN
                SET @resource = CONCAT(@gate, N':', @fewest);
                IF APPLOCK_TEST(N'public', @resource, N'Exclusive', N'Session') = 0 SET @low = @fewest;
            END;
        END;
        IF @head = 0 AND @mode <> 'Update' AND (@turn > 0 OR @busy > 0
            OR (@fair > 0 AND (@low = 0 OR @low < @largest)
                AND APPLOCK_TEST(N'public', @own, N'Exclusive', N'Session') = 0))
        BEGIN
            SELECT @may = 0, @waited = 1, @refused = CASE WHEN @busy = 0 THEN @own ELSE N'' END;
            IF @fair = 2 OR @look IS NOT NULL
            BEGIN
                SELECT @newest = COALESCE(MAX(token), 0) FROM dbo.sqlsem_slot WITH (FORCESEEK)
                WHERE semaphore_key = @key OPTION (KEEPFIXED PLAN);
                -- Nothing was granted since the last look: the first in line may be a call that was cancelled.
                IF (@fair = 2 OR @past = 1) AND @newest = @mark AND @busy = 0 SET @may = 1;
                SELECT @mark = @newest, @past = 0;
            END;
            IF @may = 0 AND @fair < 2 AND @left > 0
            BEGIN
                SET @wait = CASE WHEN @look IS NULL OR @left < @look THEN @left ELSE @look END;
                EXEC @rc = sys.sp_getapplock @own, 'Exclusive', 'Session', @wait, 'public';
                IF @rc >= 0 SELECT @head = 1, @led = -1;
                IF @rc = -1 AND @look IS NOT NULL
                    SELECT @past = CASE WHEN @wait >= 1000 THEN 1 ELSE 0 END,
                        @look = CASE WHEN @look < 1000000000 THEN @look * 2 ELSE @look END;
            END;
        END;

        -- 5. The writer's place comes before the name: so who gives up writing can have the name in Update at once.
        IF @may = 1 AND @place = 0 AND @placed = 0
        BEGIN
            SET @resource = CONCAT(N'0-', @base);
            SET @wait = CASE WHEN @head = 1 OR @mode = 'Update' THEN @left ELSE 0 END;
            EXEC @rc = sys.sp_getapplock @resource, 'Exclusive', 'Session', @wait, 'public';
            IF @rc >= 0 SELECT @placed = 1, @taken = N',0,', @least = 0, @greatest = 0;
            ELSE SELECT @may = 0, @refused = @resource;
            IF @rc = 1 SELECT @waited = 1, @may = 0;         -- the rows may say something else by now
        END;

        -- 6. The name, beside other holders or alone.
        IF @may = 1 AND @named = 0
        BEGIN
            SET @wait = CASE WHEN @head = 1 OR @mode = 'Update' THEN @left ELSE 0 END;
            EXEC @rc = sys.sp_getapplock @base, @mode, 'Session', @wait, 'public';
            IF @rc >= 0 SET @named = 1;
            ELSE SELECT @may = 0, @refused = @base, @refused_mode = @mode;
            IF @rc = 1 SELECT @waited = 1, @may = 0;
        END;

        -- 7. The slots. The first in line waits a moment for one of them; the others are only tried.
        IF @may = 1 AND @placed = 1
        BEGIN
            SELECT @rc = 0, @wait = @left;
            IF APPLOCK_TEST(N'public', @fence, N'Exclusive', N'Session') = 0
                EXEC sqlsem.internal_behind_1 @fence, 0, @mode, @wait, @rc OUTPUT;
            IF @rc >= 0 SET @count = @take;
        END;
        IF @rc = -1 SET @spent = @spent + @wait;
        IF @rc < -1 SELECT @bad = @rc, @strikes = @strikes + 1;
        IF @may = 1 AND @placed = 0
        BEGIN
            -- Of many slots those first whose row is free; all of them every two seconds.
            SET @some = CASE WHEN @turn > 0 AND @bound > 16 AND @write = 1 AND @ms - @swept < 2000 THEN 1 ELSE 0 END;
            IF @some = 0 SET @swept = @ms;
            SELECT @i = 0, @most = CASE WHEN @full = 1 OR @place IS NOT NULL THEN 1 ELSE @bound END;
            WHILE @count < @take AND @i < @most
            BEGIN
                -- The first in line tries all, and then waits for the one that it has chosen; of many, the other way.
                SET @try = CASE WHEN @full = 1 THEN @try WHEN @place IS NOT NULL THEN @place
                    WHEN @some = 1 THEN (@start + @bound) % @bound + 1 ELSE (@start + 1 + @i) % @bound + 1 END;
                SET @wait = CASE WHEN @some = 1 AND @i = 0 OR @some = 0 AND @i = @most - 1 THEN @step ELSE 0 END;
                IF @some = 1 AND @i > 0
                BEGIN
                    SET @try = NULL;
                    SELECT TOP (1) @try = slot FROM dbo.sqlsem_slot WITH (FORCESEEK)
                    WHERE semaphore_key = @key AND slot > @i - 1 AND slot BETWEEN 1 AND @bound AND expires_us IS NULL
                    ORDER BY slot OPTION (KEEPFIXED PLAN);
                    SET @i = COALESCE(@try, @bound);
                    IF @try IS NULL BREAK;
                END;
                SET @resource = CONCAT(@try, N'-', @base);
                IF @try > @low AND APPLOCK_MODE(N'public', @resource, N'Session') = N'NoLock'
                BEGIN
                    EXEC @rc = sys.sp_getapplock @resource, 'Exclusive', 'Session', @wait, 'public';
                    IF @rc >= 0 AND @full = 0
                    BEGIN
                        -- A transaction that the last holder has fenced may still be open: stand behind it.
                        IF APPLOCK_TEST(N'public', @fence, N'Exclusive', N'Session') = 0
                            EXEC sqlsem.internal_behind_1 @fence, @try, @mode, @wait, @rc OUTPUT;
                        IF @rc >= 0
                        BEGIN
                            -- A SET each: of thousands of slots, a stand-in takes long for a SELECT.
                            SET @taken = CONCAT(@taken, @try, N',');
                            SET @count = @count + 1;
                            IF @try < @least SET @least = @try;
                            IF @try > @greatest SET @greatest = @try;
                        END
                        ELSE EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
                    END
                    ELSE IF @rc >= 0         -- it was only a way to wait
                        EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
                    IF @wait > 0 SET @waited = 1;
                    IF @rc = -1 SET @spent = @spent + @wait;
                    IF @rc < -1 SELECT @bad = @rc, @strikes = @strikes + 1;
                END;
                SET @i = @i + 1;
            END;
        END;

        IF @count >= @take
        BEGIN
            SET @turn = @turn + 1;
            IF @record = 1 AND @waited = 1 AND DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME()) - @looked >= 50
                CONTINUE;
            SET @result = @waited;
            BREAK;
        END;

        -- 8. Only the first in line keeps what it has gathered: whoever waited at the gate with a lock of the name would
        -- close a circle with a first in line that wants the name alone; and so would two who gather slots at once.
        IF (@head = 0 OR (@own <> @gate AND @take > 1)) AND @mode <> 'Update' AND (@named = 1 OR @placed = 1)
        BEGIN
            EXEC sqlsem.internal_release_1 @base, @least, @greatest, @answer = 0;
            SELECT @taken = N',', @named = 0, @placed = 0, @count = 0, @least = 2147483647, @greatest = -1;
        END;
        IF @head = 1
        BEGIN
            IF @led < 0 SELECT @led = DATEDIFF_BIG(MILLISECOND, @began, SYSUTCDATETIME()), @chosen = -100;
            -- The longer it has waited, the longer it waits for one slot: at most an eighth more, and 64 ms.
            SET @step = CASE WHEN @full = 1 THEN 100 WHEN @bound = 1 THEN 1000 WHEN @ms - @led < 16 THEN 2
                WHEN @ms - @led < 512 THEN (@ms - @led) / 8 ELSE 64 END;
            IF @step > @left SET @step = @left;
            -- Who has held longest is likely to be the next to leave. That changes when somebody passes the line.
            IF @write = 0 SET @start = @start + 1;
            ELSE IF @ms - @chosen >= 16
            BEGIN
                SET @chosen = @ms;
                SELECT TOP (1) @start = slot - 1 FROM dbo.sqlsem_slot WITH (FORCESEEK)
                WHERE semaphore_key = @key AND slot BETWEEN 1 AND @bound AND expires_us IS NOT NULL
                    AND APPLOCK_MODE(N'public', CONCAT(slot, N'-', @base), N'Session') = N'NoLock'
                ORDER BY acquired_us OPTION (KEEPFIXED PLAN);
            END;
        END;
        SELECT @turn = @turn + 1, @spent = @spent + 1;
        IF @timeout = 0 OR @fair = 2
        BEGIN
            SET @result = CASE WHEN @bad < 0 THEN @bad ELSE -1 END;
            BREAK;
        END;
    END;

    IF @result = -1 AND @write = 1
    BEGIN
        -- Who had the name, and was refused a slot, was not refused by who deletes it; and who has waited has waited.
        IF @may = 1 OR @timeout <> 0 OR @timeout IS NULL SET @refused = N'';
        EXEC sqlsem.internal_gone_1 @key, @gone OUTPUT, @refused, @refused_mode;
        IF @gone = 1 SET @result = -10;
    END;
    -- The next in line goes on before anything is written: a commit may wait for a disk, or for another server.
    IF @head = 1 AND (@result <> -4 OR @keep = 0 OR @own <> @gate)
    BEGIN
        EXEC @done = sys.sp_releaseapplock @own, 'Session', 'public';
        SET @head = 0;
    END;
    IF @result < 0 AND (@named = 1 OR @placed = 1) EXEC sqlsem.internal_release_1 @base, @least, @greatest, @answer = 0;
    IF @result < 0 SET @taken = N',';
    IF @result >= 0 AND @write = 1
    BEGIN
        -- Each slot's lock is ours, so nobody else writes its row. Tokens grow: the last one and 1, or the clock.
        SET @now = DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME());
        BEGIN TRANSACTION;
        SELECT @token = MAX(token) FROM dbo.sqlsem_slot WITH (FORCESEEK)
        WHERE semaphore_key = @key AND slot BETWEEN @least AND @greatest
            AND APPLOCK_MODE(N'public', CONCAT(slot, N'-', @base), N'Session') <> N'NoLock' OPTION (KEEPFIXED PLAN);
        SET @token = CASE WHEN @token >= @now THEN @token + 1 ELSE @now END;
        IF @seen <> @kind                    -- nobody who is in uses it as the other, and people are told of this one
            UPDATE m SET kind = @kind FROM dbo.sqlsem_semaphore AS m WITH (ROWLOCK, FORCESEEK)
            WHERE name_key = @key OPTION (KEEPFIXED PLAN);
        UPDATE s SET token = @token, permit_id = @permit, acquired_us = @now, expires_us = @now + 60000000,
            lease_us = 60000000, suspect_us = NULL, thread = @thread, label = @label,
            lock_mode = CASE WHEN @lock_mode = N'' AND @kind = N'mutex' THEN N'mutex' ELSE @lock_mode END,
            user_name = @user, session_id = @@SPID, session_us = CAST(SUBSTRING(@session, 1, 20) AS bigint),
            pid = CAST(SUBSTRING(@session, 21, 20) AS bigint), process_id = SUBSTRING(@session, 41, 32),
            host = SUBSTRING(@session, 73, 510)
        FROM dbo.sqlsem_slot AS s WITH (ROWLOCK, FORCESEEK)
        WHERE semaphore_key = @key AND slot BETWEEN @least AND @greatest
            AND APPLOCK_MODE(N'public', CONCAT(slot, N'-', @base), N'Session') <> N'NoLock' OPTION (KEEPFIXED PLAN);
        IF @@ROWCOUNT = 0 SET @result = -10;             -- the rows were deleted while it waited
        -- A crash that loses this loses the locks too, and the clock goes on: no token comes back.
        COMMIT TRANSACTION WITH (DELAYED_DURABILITY = ON);  -- noqa: PRS
        IF @result < 0
        BEGIN
            EXEC sqlsem.internal_release_1 @base, @least, @greatest, @answer = 0;
            SELECT @taken = N',', @token = NULL;
        END;
    END;
    -- By how many slots this program goes: that is for people, and worth no grant.
    IF @result >= 0 AND @write = 1 AND @slots > 0 AND @slots <> @declared AND @noted < @now - 60000000
    BEGIN TRY
        EXEC sqlsem.internal_declare_1 @key, N'', @kind, @slots;
    END TRY
    BEGIN CATCH
        SET @done = 0;
    END CATCH;
END TRY
BEGIN CATCH
    SELECT @result = -14, @error = ERROR_NUMBER(), @why = ERROR_MESSAGE();
    IF @write = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
    IF @head = 1 AND APPLOCK_MODE(N'public', @own, N'Session') <> N'NoLock'
        EXEC @done = sys.sp_releaseapplock @own, 'Session', 'public';
    SET @head = 0;
    IF @named = 1 OR @placed = 1
    BEGIN
        EXEC sqlsem.internal_release_1 @base, @least, @greatest, @answer = 0;
        IF APPLOCK_MODE(N'public', @resource, N'Session') <> N'NoLock'
            EXEC @done = sys.sp_releaseapplock @resource, 'Session', 'public';
    END;
    IF @error IN (207, 208) THROW;           -- a server that lets us catch that here
END CATCH;

IF @seen <> @kind AND @result IN (-11, -1, 1) SET @why = @seen;
SET @waited_ms = CASE WHEN @waited = 0 THEN 0 WHEN @ms > 2147483647 THEN 2147483647 ELSE @ms END;
IF @answer = 1
    SELECT @result AS result, @taken AS taken, @token AS token, @bound AS bound, @mark AS mark,
        @head AS head, @error AS error, @why AS why, CONTEXT_INFO() AS stamp;
