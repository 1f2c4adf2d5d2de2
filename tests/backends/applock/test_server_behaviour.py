"""What SQL Server's application locks do that the library relies on, executable: a new version that differs is seen.

Each test says where its expectation comes from: a page of Microsoft's documentation, a capture of what SQL Server 2025
sent, or an inference that nothing official backs. Nothing here uses the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from tests.backends.applock.plain import ALIAS, LONG, Request, Session, free, is_there, skip_unless_covered, works
from tests.support import tds
from tests.support.processes import Child
from tests.support.threads import wait_until

skip_unless_covered()

#: What the stand-in lacks, or does otherwise, by the names of the tests.
LACKS: dict[str, str] = {
    "test_a_lock_timeout_ends_with_the_batch_that_has_parameters": "SET in a batch with parameters outlives it",
    "test_dm_tran_locks_shows_who_has_and_who_waits": "it has no sys.dm_tran_locks",
    "test_dm_tran_locks_needs_a_right": "it has no sys.dm_tran_locks",
}

Opener = Callable[..., Session]


@pytest.fixture(autouse=True)
def _lacks(request: pytest.FixtureRequest, committed: None) -> None:
    reason = LACKS.get(request.node.name) or LACKS.get(request.node.originalname)
    if reason and tds.is_stand_in(ALIAS):
        pytest.skip(f"the stand-in differs: {reason}")


@pytest.fixture
def opened(committed: None) -> Iterator[Opener]:
    """A function that opens one more session, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def opened(**settings: str) -> Session:
            session = Session(**settings)
            stack.callback(session.close)
            return session

        yield opened


@pytest.fixture
def one(opened: Opener) -> Session:
    return opened()


@pytest.fixture
def two(opened: Opener) -> Session:
    return opened()


@pytest.fixture
def three(opened: Opener) -> Session:
    return opened()


@pytest.fixture
def name() -> str:
    """A resource that no other test has."""
    return f"behaviour:{secrets.token_hex(8)}"


# --- Return codes ---


def test_0_is_a_grant_at_once(one, name):
    """Documented: sp_getapplock, return code values."""
    assert one.get(name) == 0
    assert one.mode(name) == "Exclusive"


def test_1_is_a_grant_after_waiting(one, two, name):
    """Documented: sp_getapplock, return code values."""
    assert one.get(name) == 0
    request = Request(two, name).queued(one)
    assert one.release(name) == 0
    assert request.result() == 1
    assert two.mode(name) == "Exclusive"


def test_minus_1_is_a_refusal_at_once_without_an_error(one, two, name):
    """Documented: sp_getapplock, return code values; captured: nothing is raised."""
    one.get(name)
    two.get(f"{name}:first")  # which may take longer
    began = time.monotonic()
    assert two.get(name, ms=0) == -1
    assert time.monotonic() - began < 1
    assert two.mode(name) == "NoLock"


def test_minus_1_is_the_end_of_the_time(one, two, name):
    """Documented: sp_getapplock, @LockTimeout is in milliseconds."""
    one.get(name)
    began = time.monotonic()
    assert two.get(name, ms=400) == -1
    assert 0.35 < time.monotonic() - began < 3


def test_minus_3_is_the_victim_of_a_deadlock_which_keeps_the_rest(one, two, name):
    """Documented: sp_getapplock, return code values; captured: no error 1205, and the victim's other locks stay."""
    held = {one: f"{name}:1", two: f"{name}:2"}
    assert [session.get(resource) for session, resource in held.items()] == [0, 0]
    requests = {one: Request(one, held[two]), two: Request(two, held[one])}
    wait_until(lambda: any(request.done for request in requests.values()), timeout=30)
    victim = next(session for session, request in requests.items() if request.done)
    (partner,) = set(requests) - {victim}
    assert requests[victim].result() == -3
    assert victim.mode(held[victim]) == "Exclusive"
    assert not requests[partner].done
    assert victim.release(held[victim]) == 0
    assert requests[partner].result() == 1


@pytest.mark.parametrize(
    ("mode", "owner"), [("Bogus", "Session"), ("Exclusive", "Bogus"), ("Exclusive", "Transaction")]
)
def test_minus_999_may_come_without_an_error(one, name, mode, owner):
    """Documented: -999 is a call error; captured: an unknown mode or owner, and the owner Transaction outside one."""
    assert one.get(name, mode, owner=owner) == -999
    assert one.mode(name) == "NoLock"


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ("@Resource = NULL, @LockMode = 'Exclusive', @LockOwner = 'Session'", 1224),
        ("@Resource = N'x', @LockMode = 'Exclusive', @LockOwner = 'Session', @LockTimeout = -2", 1227),
        ("@Resource = N'x', @LockMode = 'Exclusive', @LockOwner = 'Session', @DbPrincipal = 'nobody at all'", 1202),
    ],
)
def test_other_bad_arguments_are_errors(one, arguments, number):
    """Captured; the numbers are documented under database engine errors."""
    assert one.caught(f"EXEC sys.sp_getapplock {arguments};") == number


# --- Errors ---


def test_1223_is_a_release_of_what_is_not_held(one, two, name):
    """Captured: severity 16, which CATCH sees; also if another session has it, or the other owner."""
    release = f"EXEC sys.sp_releaseapplock @Resource = N'{name}', @LockOwner = 'Session';"
    assert one.caught(release) == 1223
    two.get(name)
    assert one.caught(release) == 1223
    assert two.mode(name) == "Exclusive"


def test_the_driver_raises_1223_and_the_session_goes_on(one, name):
    """Inferred from the severity; captured: the batch goes on and the return code is -999."""
    with pytest.raises(one.error_class, match=r"(?i)application lock|1223"):
        one.release(name)
    assert one.get(name) == 0


def test_a_row_that_stays_locked_is_1222_and_costs_no_application_lock(one, two, name):
    """Documented: SET LOCK_TIMEOUT; captured: a session's locks survive errors."""
    one.do("INSERT INTO testapp_probe (name, inside, peak, entered) VALUES (?, 0, 0, 0)", name)
    update = f"UPDATE testapp_probe SET entered = entered + 1 WHERE name = N'{name}';"
    two.get(name)
    one.do(f"BEGIN TRANSACTION; {update}")
    assert two.caught(f"SET LOCK_TIMEOUT 200; {update}") == 1222
    assert two.mode(name) == "Exclusive"
    one.do("ROLLBACK TRANSACTION")


def test_a_duplicate_key_is_2627_or_2601(one, name):
    """Documented: database engine errors."""
    insert = f"INSERT INTO testapp_probe (name, inside, peak, entered) VALUES (N'{name}', 0, 0, 0);"
    assert one.caught(insert) == 0
    assert one.caught(insert) in (2601, 2627)


def test_a_lock_timeout_ends_with_the_batch_that_has_parameters(one):
    """Documented: SET statements in a procedure end with it; inferred: sp_executesql, which drivers use, counts."""
    assert one.value("SET LOCK_TIMEOUT 1234; SELECT @@LOCK_TIMEOUT + ?", 0) == 1234
    assert one.value("SELECT @@LOCK_TIMEOUT") == -1


# --- What a lock is ---


def test_a_session_that_has_it_gets_it_again_and_releases_as_often(one, two, name):
    """Documented: sp_releaseapplock must be called as often as sp_getapplock."""
    assert [one.get(name), one.get(name)] == [0, 0]
    assert one.release(name) == 0
    assert two.get(name) == -1
    assert one.release(name) == 0
    assert two.get(name) == 0


@pytest.mark.parametrize(
    ("held", "other"),
    [("name", "Name"), ("name", "name "), ("name", "nam\u00e9"), ("caf\u00e9", "cafe\u0301"), ("\uff41", "a")],
)
def test_names_are_compared_in_binary(one, two, name, held, other):
    """Documented: sp_getapplock compares in binary, whatever the collation."""
    assert one.get(f"{name}{held}") == 0
    assert two.get(f"{name}{other}") == 0
    assert two.get(f"{name}{held}") == -1


@pytest.mark.parametrize(
    "unit",
    [pytest.param("x", id="ascii"), pytest.param("\u00e9", id="latin"), pytest.param("\U0001f512", id="two-units")],
)
def test_names_are_cut_after_255_units(one, two, name, unit):
    """Documented: sp_getapplock, @Resource is nvarchar(255) and longer ones are cut; without an error: captured."""
    width = len(unit.encode("utf-16-le")) // 2
    start = (unit * 255)[: (255 - len(name) - 1) // width]
    start = name + start + "-" * (255 - len(name) - width * len(start))
    assert one.get(f"{start}1") == 0
    assert two.get(f"{start}2") == -1
    assert two.get(f"{start[:-1]}2") == 0
    assert two.get(start) == -1


def test_the_default_principal_is_public(one, two, name):
    """Documented: sp_getapplock, @DbPrincipal; the procedures that DBAs know leave it out."""
    one.do(f"EXEC sp_getapplock @Resource = N'{name}', @LockMode = N'Exclusive', @LockOwner = N'Session';")
    assert two.get(name) == -1
    one.do(f"EXEC sp_releaseapplock N'{name}', 'Session';")
    assert two.get(name) == 0


def test_each_database_has_its_own(one, opened, name):
    """Documented: sp_getapplock, the resource is scoped to the current database."""
    assert one.get(name) == 0
    assert opened(NAME="master").get(name) == 0


def test_exclusive_excludes_and_intents_do_not(one, two, three, name):
    """Documented: sp_getapplock, compatibility of modes: every holder has the intent on the semaphore's name."""
    assert [one.get(name, "IntentExclusive"), two.get(name, "IntentExclusive")] == [0, 0]
    assert three.get(name) == -1
    assert three.test(name) == 0
    one.release(name)
    two.release(name)
    assert three.get(name) == 0
    assert one.get(name, "IntentExclusive") == -1


# --- Owners and transactions ---


def test_a_sessions_lock_survives_commit_and_rollback(one, two, name):
    """Documented: sp_getapplock, the owner Session; captured inside and outside of transactions."""
    one.get(name)
    one.do("BEGIN TRANSACTION")
    one.get(f"{name}:inside")
    one.do("ROLLBACK TRANSACTION")
    assert (one.mode(name), one.mode(f"{name}:inside")) == ("Exclusive", "Exclusive")
    one.do("BEGIN TRANSACTION")
    one.do("COMMIT TRANSACTION")
    assert (two.get(name), two.get(f"{name}:inside")) == (-1, -1)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_transactions_lock_ends_with_it(one, two, name, end):
    """Documented: sp_getapplock, the owner Transaction."""
    one.do("BEGIN TRANSACTION")
    assert one.get(name, owner="Transaction") == 0
    assert two.get(name) == -1
    one.do(f"{end} TRANSACTION")
    assert two.get(name) == 0


def test_the_two_owners_of_a_session_are_not_in_each_others_way(one, two, name):
    """Captured: both get it, each sees its own, and another session gets it when both are done."""
    assert one.get(name) == 0
    one.do("BEGIN TRANSACTION")
    assert one.get(name, owner="Transaction") == 0
    assert one.release(name) == 0
    assert (one.mode(name), one.mode(name, owner="Transaction")) == ("NoLock", "Exclusive")
    assert two.get(name) == -1
    one.do("COMMIT TRANSACTION")
    assert two.get(name) == 0


def test_an_error_that_is_caught_costs_no_lock(one, name):
    """Documented: TRY...CATCH; captured: errors leave a session's locks alone."""
    one.get(name)
    assert one.caught("SELECT 1 / 0;") == 8134
    assert one.mode(name) == "Exclusive"


# --- Looking ---


def test_applock_mode_sees_only_its_own_session(one, two, name):
    """Documented: APPLOCK_MODE; captured: another session's lock is NoLock."""
    assert one.mode(name) == "NoLock"
    one.get(name, "IntentExclusive")
    assert (one.mode(name), two.mode(name)) == ("IntentExclusive", "NoLock")
    one.release(name)
    one.get(name)
    assert (one.mode(name), two.mode(name)) == ("Exclusive", "NoLock")


def test_applock_test_sees_what_others_have(one, two, name):
    """Documented: APPLOCK_TEST; captured: 1 for the session that has it."""
    assert (one.test(name), two.test(name)) == (1, 1)
    one.get(name)
    assert (one.test(name), two.test(name)) == (1, 0)
    one.release(name)
    assert two.test(name) == 1


def test_applock_test_sees_who_waits(one, two, three, name):
    """Captured: behind a waiting Exclusive even what is compatible with the holder would have to wait."""
    one.get(name, "IntentExclusive")
    assert three.test(name, "IntentExclusive") == 1
    request = Request(two, name).queued(three)
    assert three.test(name, "IntentExclusive") == 0
    assert three.get(name, "IntentExclusive") == -1
    one.release(name)
    assert request.result() == 1


# --- The queue ---


def test_waiters_are_served_in_the_order_of_their_coming(opened, one, two, name):
    """Inferred from what the lock manager's engineers wrote: relaxed first come, first served."""
    one.get(name)
    requests = [Request(opened(), name).queued(two) for _ in range(5)]
    one.release(name)
    for place, request in enumerate(requests):
        assert request.result() == 1
        assert not any(later.done for later in requests[place + 1 :])
        assert two.get(name) == -1
        request.session.release(name)


def test_who_left_the_queue_is_passed_over(opened, one, two, name):
    """Documented: sp_getapplock, -1 after the time; the others keep their order."""
    one.get(name)
    leaves = Request(opened(), name, ms=3000).queued(two)
    stays = Request(opened(), name).queued(two)
    assert leaves.result() == -1
    one.release(name)
    assert stays.result() == 1


# --- Ends of sessions ---


def test_closing_a_session_frees_its_locks(one, opened, name):
    """Documented: sp_getapplock, a session's locks end with it. No pool may keep it: DATABASE_CONNECTION_POOLING."""
    session = opened()
    session.get(name)
    session.close()
    wait_until(free(name, one), timeout=2)


def test_a_killed_process_frees_its_locks(one, name):
    """Documented: as above. The system closes a dead process's sockets, and the server sees it."""
    with Child("tests.backends.applock.plain:hold", name) as child:
        child.expect("session")
        child.expect("got 0")
        assert one.test(name) == 0
        killed = time.monotonic()
        child.kill()
        wait_until(free(name, one), timeout=2)
        print(f"\nfree {1000 * (time.monotonic() - killed):.0f} ms after the kill")


@pytest.mark.parametrize("idle", [0.0, 1.5])
def test_a_process_that_is_killed_while_it_waits_leaves_the_queue(one, two, name, idle):
    """Inferred: the server notices that the client of a waiting request has gone. Waits are left by cutting sockets.

    It does so on a session that has been idle before, too.
    """
    one.get(name)
    with Child("tests.backends.applock.plain:hold", name, LONG, idle) as child:
        waiter = int(child.expect("session"))
        wait_until(lambda: works(waiter, two))
        child.silent(0.1)
        killed = time.monotonic()
        child.kill()
        wait_until(lambda: not is_there(waiter, two))
        print(f"\ngone {1000 * (time.monotonic() - killed):.0f} ms after the kill")
    one.release(name)
    assert two.get(name, ms=1000) >= 0


def test_a_killed_session_loses_its_locks_and_its_next_statement_fails(one, two, name):
    """Documented: KILL ends the session; its next statement is an error of the driver's."""
    one.get(name)
    two.do(f"KILL {one.spid}")
    wait_until(free(name, two), timeout=5)
    with pytest.raises(one.error_class):
        one.do("SELECT 1")


def test_a_session_that_is_killed_while_it_waits_leaves_the_queue(one, two, three, name):
    """Documented: KILL; a waiting request ends with an error, not with a return code."""
    one.get(name)
    request = Request(two, name).queued(three)
    three.do(f"KILL {two.spid}")
    with pytest.raises(two.error_class):
        request.result()
    one.release(name)
    assert three.get(name, ms=1000) >= 0


def test_locks_without_a_transaction_outlive_the_batch_with_parameters(one, two, name):
    """Inferred: sp_executesql is no session, so a session's locks do not end with it."""
    inner = f"EXEC sys.sp_getapplock @Resource = N'{name}:nested', @LockMode = 'Exclusive', @LockOwner = 'Session'"
    one.do("SET NOCOUNT ON; DECLARE @sql nvarchar(400) = ?; EXEC sp_executesql @sql;", inner)
    one.get(name)  # with parameters, too
    assert (one.mode(name), one.mode(f"{name}:nested")) == ("Exclusive", "Exclusive")
    assert (two.test(name), two.test(f"{name}:nested")) == (0, 0)


# --- Batches ---


def test_a_batch_of_many_refusals_answers_once(one, two, name):
    """Documented: SET NOCOUNT ON stops the counts; captured: a refusal sends nothing else."""
    for slot in range(1, 41):
        one.get(f"{slot}-{name}")
    sweep = """
SET NOCOUNT ON;
DECLARE @name nvarchar(200) = ?, @slot int = 1, @refused int = 0, @rc int, @resource nvarchar(255);
WHILE @slot <= 40
BEGIN
    SET @resource = CONCAT(@slot, N'-', @name);
    EXEC @rc = sys.sp_getapplock @Resource = @resource, @LockMode = 'Exclusive', @LockOwner = 'Session',
        @LockTimeout = 0, @DbPrincipal = 'public';
    IF @rc = -1 SET @refused = @refused + 1;
    SET @slot = @slot + 1;
END;
SELECT @refused;
"""
    for _ in range(5):
        assert two.rows(sweep, name) == [(40,)]
    with contextlib.closing(two.raw.cursor()) as cursor:
        cursor.execute(sweep, (name,))
        assert cursor.description is not None, "something comes before the answer"


def test_the_digest_of_a_name_is_that_of_its_utf_16(one):
    """Documented: HASHBYTES; nvarchar is UTF-16LE. Procedures must come to the same resources as we do."""
    text = "1-caf\u00e9 \U0001f512"
    sql = "SELECT LOWER(CONVERT(char(64), HASHBYTES('SHA2_256', CAST(? AS nvarchar(200))), 2))"
    assert one.value(sql, text) == hashlib.sha256(text.encode("utf-16-le")).hexdigest()


def test_the_servers_clock_counts_microseconds(one):
    """Documented: DATEDIFF_BIG (2016 or newer) and SYSUTCDATETIME."""
    now = one.value("SELECT DATEDIFF_BIG(MICROSECOND, '1970-01-01', SYSUTCDATETIME())")
    assert abs(now / 1_000_000 - time.time()) < 60


# --- Who it is ---


def test_context_info_can_be_read_by_others(one, two):
    """Documented: SET CONTEXT_INFO, also in sys.dm_exec_sessions; it lasts as long as the session."""
    stamp = f"sqlsem:{secrets.token_hex(16)}:{secrets.token_hex(8)}".encode()
    before = one.value("SELECT CONTEXT_INFO()")
    assert before is None or not before.startswith(b"sqlsem:")  # on Azure SQL it is a GUID
    one.do("SET NOCOUNT ON; DECLARE @c varbinary(128) = CAST(? AS varbinary(128)); SET CONTEXT_INFO @c;", stamp)
    assert one.value("SELECT CONTEXT_INFO()").rstrip(b"\0") == stamp
    seen = two.value("SELECT context_info FROM sys.dm_exec_sessions WHERE session_id = ?", one.spid)
    assert seen.rstrip(b"\0") == stamp


def test_a_session_is_known_by_its_id_and_the_time_of_its_login(one, two):
    """Documented: sys.dm_exec_sessions; ids are used again, so a KILL looks at the time first."""
    columns = "session_id, login_time, login_name, host_name, program_name, host_process_id"
    row = two.rows(f"SELECT {columns} FROM sys.dm_exec_sessions WHERE session_id = ?", one.spid)
    assert len(row) == 1
    assert row[0][0] == one.spid
    assert row[0][1] is not None
    assert row[0][2]


def test_the_sessions_of_a_database_can_be_told(one, two):
    """Documented: sys.dm_exec_sessions, database_id."""
    assert one.spid in {int(row[0]) for row in two.rows(tds.SESSIONS)}
    assert two.spid not in {int(row[0]) for row in two.rows(tds.SESSIONS)}


TRAN_LOCKS = """
SELECT resource_description, request_mode, request_status, request_owner_type, request_session_id,
    request_reference_count
FROM sys.dm_tran_locks
WHERE resource_type = N'APPLICATION' AND resource_database_id = DB_ID() AND request_session_id IN (?, ?)
ORDER BY request_session_id
"""


def test_dm_tran_locks_shows_who_has_and_who_waits(one, two, three):
    """Documented: sys.dm_tran_locks. GRANT where the page says GRANTED: seen in everybody's scripts."""
    name = f"1-{secrets.token_hex(20)}"
    one.get(name)
    one.get(name)
    request = Request(two, name).queued(three)
    rows = {row[4]: row for row in three.rows(TRAN_LOCKS, one.spid, two.spid)}
    assert set(rows) == {one.spid, two.spid}
    for description, mode, _, owner, _, _ in rows.values():
        assert description.startswith(f"0:[{name[:32]}]:(")
        assert mode.strip() == "X"
        assert owner.strip().endswith("SESSION")
    assert rows[one.spid][2].strip().startswith("GRANT")
    assert rows[one.spid][5] == 2
    assert rows[two.spid][2].strip() == "WAIT"
    one.release(name)
    one.release(name)
    assert request.result() == 1


# --- Rights ---


@pytest.fixture
def plain(one, opened) -> Iterator[Session]:
    """A session of a login that may do nothing but connect."""
    login, secret = f"sqlsem_{secrets.token_hex(4)}", f"Aa1_{secrets.token_hex(12)}"
    one.do(f"CREATE LOGIN [{login}] WITH PASSWORD = '{secret}'")
    session = None
    try:
        one.do(f"CREATE USER [{login}] FOR LOGIN [{login}]")
        session = opened(USER=login, PASSWORD=secret)
        yield session
    finally:
        if session is not None:
            session.close()
            wait_until(lambda: not is_there(session.spid, one))
        with contextlib.suppress(one.error_class):
            one.do(f"DROP USER [{login}]")
        one.do(f"DROP LOGIN [{login}]")


def test_locks_need_no_rights(plain, one, name):
    """Documented: sp_getapplock, membership of public is enough."""
    assert plain.get(name) == 0
    assert one.get(name) == -1
    assert plain.mode(name) == "Exclusive"
    assert plain.release(name) == 0
    one.get(name)
    assert plain.test(name) == 0


def test_dm_tran_locks_needs_a_right(plain):
    """Documented: sys.dm_tran_locks, VIEW SERVER STATE or its newer names; 300 and 297: measured by many projects."""
    assert plain.value("SELECT HAS_PERMS_BY_NAME(NULL, NULL, 'VIEW SERVER STATE')") == 0
    assert plain.caught("SELECT COUNT(*) FROM sys.dm_tran_locks;") in (297, 300)


def test_kill_needs_a_right(plain, one, name):
    """Documented: KILL, ALTER ANY CONNECTION; without it, error 6102."""
    one.get(name)
    with pytest.raises(plain.error_class):
        plain.do(f"KILL {one.spid}")
    assert one.mode(name) == "Exclusive"


def test_a_login_sees_its_own_session(plain):
    """Documented: sys.dm_exec_sessions, everyone sees their own."""
    assert plain.value("SELECT COUNT(*) FROM sys.dm_exec_sessions WHERE session_id = @@SPID AND login_time > 0") == 1
