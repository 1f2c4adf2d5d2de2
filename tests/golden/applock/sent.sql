-- What the applock backend sends, but for the procedures in backends/applock/sql. Written by python -m tests.golden: not to be edited.

-- settings
SET XACT_ABORT ON;
SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET DEADLOCK_PRIORITY HIGH;
SET LOCK_TIMEOUT 2000;

-- open
SET NOCOUNT ON;
DECLARE @before varbinary(128) = CONTEXT_INFO(), @new varbinary(128) = CAST('sqlsem:process:session' AS
      varbinary(128));
SET CONTEXT_INFO @new;
SELECT @@SPID AS session_id, CASE WHEN SUBSTRING(@before, 1, 7) = 0x73716C73656D3A THEN 1 ELSE 0 END AS used,
    CASE WHEN CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(20)) = N'READ_ONLY' THEN 1 ELSE 0 END
    AS read_only,
    (SELECT DATEDIFF_BIG(MICROSECOND, '1970-01-01', login_time) FROM sys.dm_exec_sessions WHERE session_id = @@SPID)
    AS session_us;

-- call acquire
EXEC sqlsem.internal_acquire_1 @base = ?, @key = ?, @kind = ?, @slots = ?, @permit = ?, @thread = ?, @label = ?,
      @user = ?, @session = ?, @lock_mode = ?, @take = ?, @timeout = ?, @fair = ?, @head = ?, @mark = ?, @answer = 1;

-- call acquire_unrecorded
EXEC sqlsem.internal_acquire_1 @base = ?, @key = ?, @kind = ?, @slots = ?, @lock_mode = ?, @take = ?, @timeout = ?,
      @fair = ?, @head = ?, @mark = ?, @answer = 1;

-- call be_reader
EXEC sqlsem.internal_downgrade_1 @base = ?, @key = ?, @permit = ?;

-- call be_writer
EXEC sqlsem.internal_upgrade_1 @base = ?, @key = ?, @slots = ?, @timeout = ?, @close = ?, @permit = ?;

-- call clean
EXEC sqlsem.internal_release_1 @base = ?, @last = ?, @key = ?, @permit = ?;

-- call declare
EXEC sqlsem.internal_declare_1 @key = ?, @name = ?, @kind = ?, @slots = ?, @template = ?, @answer = 1;

-- call fence_off
EXEC sqlsem.internal_fence_1 @key = ?, @taken = ?, @timeout = ?;

-- call forget
EXEC sqlsem.internal_forget_1 @key = ?, @permit = ?, @slot = ?, @token = ?;

-- call prove
EXEC sqlsem.internal_prove_1 @held = ?, @record = ?;

-- call read
EXEC sqlsem.internal_read_1 @keys = ?, @prefix = ?, @template = ?;

-- call release
EXEC sqlsem.internal_release_1 @base = ?, @slot = ?, @key = ?, @permit = ?;

-- call release_several
EXEC sqlsem.internal_release_1 @base = ?, @slot = ?, @last = ?, @key = ?, @permit = ?;

-- call release_unrecorded
EXEC sqlsem.internal_release_1 @base = ?, @slot = ?;

-- call rename
EXEC sqlsem.internal_rename_1 @key = ?, @before = ?, @permit = ?, @thread = ?, @label = ?, @user = ?;

-- call try
EXEC sqlsem.internal_try_1 @base = ?, @key = ?, @kind = ?, @slots = ?, @permit = ?, @thread = ?, @label = ?, @user =
      ?, @session = ?;

-- call try_unrecorded
EXEC sqlsem.internal_try_1 @base = ?, @key = ?, @kind = ?, @slots = ?;

-- call waiting
EXEC sqlsem.internal_waiting_1 @ticket = ?, @key = ?, @waiting = ?, @age = ?, @take = ?, @lock_mode = ?, @thread =
      ?, @label = ?, @user = ?, @session = ?;

-- views
SELECT CAST(l.resource_description AS varbinary(512)) AS described, l.request_mode AS mode,
    l.request_status AS status, l.request_owner_type AS owner, l.request_session_id AS session_id,
    DATEDIFF_BIG(MICROSECOND, '1970-01-01', s.login_time) AS session_us, s.program_name AS program,
    s.host_name AS host, s.host_process_id AS pid, s.login_name AS login,
    CASE WHEN SUBSTRING(s.context_info, 1, 7) = 0x73716C73656D3A
        THEN CAST(SUBSTRING(s.context_info, 8, 32) AS varchar(32)) END AS process, w.waited_ms
FROM sys.dm_tran_locks AS l
LEFT JOIN sys.dm_exec_sessions AS s ON s.session_id = l.request_session_id
LEFT JOIN (
    SELECT session_id, resource_address, MAX(wait_duration_ms) AS waited_ms
    FROM sys.dm_os_waiting_tasks GROUP BY session_id, resource_address
) AS w ON w.resource_address = l.lock_owner_address AND w.session_id = l.request_session_id
WHERE l.resource_type = N'APPLICATION' AND l.resource_database_id = DB_ID() AND l.request_session_id > 0;

-- take until the end of a transaction
SET NOCOUNT ON; DECLARE @rc int, @one int, @resource nvarchar(255) = ?; SELECT TOP (1) @one = slot FROM sqlsem_slot
      WITH (NOLOCK); EXEC @rc = sys.sp_getapplock @Resource = @resource, @LockMode = 'Exclusive', @LockOwner =
      'Transaction', @LockTimeout = 0, @DbPrincipal = 'public'; SELECT @rc AS rc; SET NOCOUNT OFF;

-- kill
SET NOCOUNT ON; IF EXISTS (SELECT 1 FROM sys.dm_exec_sessions WHERE session_id = 1 AND DATEDIFF_BIG(MICROSECOND,
      '1970-01-01', login_time) = 2) BEGIN KILL 1; SELECT 1 AS found; END ELSE SELECT COALESCE((SELECT MIN(0) FROM
      sys.dm_exec_sessions WHERE session_id <> @@SPID), -1) AS found; SET NOCOUNT OFF;

-- fenced
SELECT 1 WHERE EXISTS (SELECT 1 FROM sqlsem_slot WITH (FORCESEEK) WHERE semaphore_key = ? AND slot = ? AND token = ?
      AND permit_id = ?) AND APPLOCK_TEST(N'public', ?, N'Exclusive', N'Session') = 0;
