"""What is made of the server's views, with rows as the views show them: descriptions, cuts, and who is who."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.utils import ProgrammingError

from django_sqlsem.backends.applock import reading
from django_sqlsem.backends.applock.reading import with_sessions
from django_sqlsem.backends.clock import RowClock
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.snapshots import HolderSnapshot, SlotState
from tests.backends.applock.test_tsql_lint import faults

OURS = "6f9619ff8b86d011b42d00c04fc964ff"
LONG = "monthly:report:of:the:whole:company"
#: When sessions began, in microseconds.
BEGAN = 1_763_677_312_003_333


def described(resource: str, hash_: str = "2579568b", principal: int = 0) -> bytes:
    """Return the view's description of a resource: the first 32 characters, and blanks at the end."""
    cut = resource.encode("utf-16-le", "surrogatepass")[:64].decode("utf-16-le", "surrogatepass")
    return f"{principal}:[{cut}]:({hash_})".ljust(60).encode("utf-16-le", "surrogatepass")


def row(resource: str, session: int = 57, mode: str = "X", status: str = "GRANT", **values: Any) -> dict[str, Any]:
    """Return a row as ``QUERY`` does."""
    hash_ = values.pop("hash_", "2579568b")
    return {
        "described": described(resource, hash_),
        "mode": mode,
        "status": status,
        "owner": "SESSION",
        "session_id": session,
        "session_us": BEGAN + session,
        "program": ".Net SqlClient Data Provider",
        "host": "ETL1",
        "pid": 4242,
        "login": "etl",
        "process": None,
        "waited_ms": None,
    } | values


def found(*rows: dict[str, Any]) -> reading.Locks:
    return reading.locks(rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:[PhoneCall_6ae8d389-f282-e311-b85]:(2579568b)", ("PhoneCall_6ae8d389-f282-e311-b85", "2579568b")),
        ("0:[1-reports]:(2579568b)             ", ("1-reports", "2579568b")),
        ("0:[1-a]:(b]:(0A0B0C0D)", ("1-a]:(b", "0a0b0c0d")),
        ("0:[1-x ]:(00000001)", ("1-x ", "00000001")),
        ("0:[1-two\nlines]:(00000001)", ("1-two\nlines", "00000001")),
        ("0:[]:(00000001)", ("", "00000001")),
        ("1:[1-reports]:(2579568b)", None),
        ("16384:[1-reports]:(2579568b)", None),
        ("", None),
        ("KEY: 5:72057594038321152", None),
    ],
)
def test_a_description(text: str, expected: tuple[str, str] | None) -> None:
    assert reading.parse(text) == expected


def test_a_holder_is_found_by_its_resource() -> None:
    locks = found(row("1-reports"), row("reports", mode="IX"), row("2-reports", 58, status="GRANTED"))
    holder = locks.holder("1-reports")
    assert holder is not None
    assert (holder.session_id, holder.session_us, holder.program, holder.host, holder.pid, holder.login) == (
        57,
        BEGAN + 57,
        ".Net SqlClient Data Provider",
        "ETL1",
        4242,
        "etl",
    )
    assert locks.holder("2-reports").session_id == 58  # type: ignore[union-attr]
    assert locks.holder("3-reports") is None
    assert locks.holder("1-Reports") is None
    assert set(locks.slots(lock_names("reports"))) == {1, 2}


def test_who_only_waits_does_not_hold() -> None:
    locks = found(row("1-reports", status="WAIT"), row("2-reports", status="CONVERT"))
    assert locks.holder("1-reports") is None
    assert locks.slots(lock_names("reports")) == {}


def test_another_mode_takes_a_slot_too() -> None:
    assert found(row("1-reports", mode="S")).holder("1-reports") is not None


def test_what_is_not_publics_or_not_a_sessions_is_left_out() -> None:
    other = row("1-reports") | {"described": described("1-reports", principal=5)}
    assert found(other).holder("1-reports") is None


def test_a_long_name_is_believed_while_there_is_one_like_it() -> None:
    mine, theirs = f"1-{LONG}", f"1-{LONG}:2"
    assert found(row(mine)).holder(mine) is not None
    both = found(row(mine), row(theirs, 58, hash_="0badcafe"))
    assert both.holder(mine) is None
    assert both.holder(theirs) is None
    assert both.slots(lock_names(LONG)) == {}


def test_exactly_as_much_as_is_shown_may_be_more() -> None:
    thirty = "x" * 30
    locks = found(row(f"1-{thirty}"), row(f"1-{thirty}yz", 58, hash_="0badcafe"))
    assert locks.holder(f"1-{thirty}") is None
    assert found(row(f"1-{'x' * 29}")).slots(lock_names("x" * 29))
    assert not found(row(f"1-{thirty}")).slots(lock_names(thirty))


def test_a_cut_inside_a_character_harms_nobody() -> None:
    name = "x" * 29 + "🔒" + "rest"
    locks = found(row(f"1-{name}"), row("1-reports", 58))
    assert locks.holder(f"1-{name}").session_id == 57  # type: ignore[union-attr]
    assert locks.holder("1-reports").session_id == 58  # type: ignore[union-attr]


def test_waiters_at_the_gate_and_at_slots() -> None:
    names = lock_names("reports")
    locks = found(
        row("1-reports", 50),
        row(names.gate, 60, waited_ms=None),
        row(names.gate, 61, status="WAIT", waited_ms=1500),
        row(names.gate, 62, status="WAIT", waited_ms=2500),
        row(names.gate, 63, status="WAIT", waited_ms=9000, process=OURS),
        row(f"{names.gate}:2", 66, status="WAIT", waited_ms=100),
        row("1-reports", 60, status="WAIT", waited_ms=20),
        row("1-reports", 64, status="WAIT", waited_ms=700),
        row("1-other", 65, status="WAIT", waited_ms=700),
    )
    told = locks.waiters(names, [1, 2, 3], known=[OURS])
    assert [(lock.session_id, lock.waited) for lock in told] == [(60, 0.02), (62, 2.5), (61, 1.5), (64, 0.7), (66, 0.1)]
    assert [lock.session_id for lock in locks.waiters(names, [1])] == [60, 63, 62, 61, 64, 66]


def test_who_takes_the_gate_to_purge_does_not_wait() -> None:
    names = lock_names("reports")
    assert found(row(names.gate, owner="TRANSACTION")).waiters(names, [1]) == []


def test_semaphores_without_rows_are_those_whose_holders_have_the_name_too() -> None:
    locks = found(
        row("1-etl"), row("etl", mode="IX"), row("2-etl", 58), row("etl", 58, mode="IX"),
        row("1-lonely", 59), row("somebody:elses:lock", 60), row("7-1-x", 61), row("1-x", 61, mode="IX"),
    )  # fmt: skip
    assert {name: sorted(slots) for name, slots in locks.semaphores().items()} == {"etl": [1, 2]}


# --- With what the rows say ---

CLOCK = RowClock(BEGAN, "")


def holder(slot: int = 1, *, state: SlotState = SlotState.HELD, session: int = 57, name: str = "reports") -> Any:
    return HolderSnapshot(
        name=name,
        slot=slot,
        state=state,
        token=7,
        host="web1",
        pid=4711,
        thread="MainThread",
        label="GET /",
        user="ann",
        acquired_at=CLOCK.wall,
        expires_at=None,
        age=10.0,
        lease_left=None,
        session_id=session,
        session_us=BEGAN + session,
    )


def test_the_holder_that_has_the_lock_keeps_its_row_and_gets_a_session() -> None:
    (seen,) = with_sessions(CLOCK, "reports", [holder()], {1}, found(row("1-reports")))
    assert (seen.host, seen.token, seen.recorded) == ("web1", 7, True)
    assert (seen.session_id, seen.login, seen.program) == (57, "etl", ".Net SqlClient Data Provider")


@pytest.mark.parametrize("other", [{"session": 58}, {"session_us": BEGAN + 999}])
def test_a_row_of_another_session_does_not_name_the_holder(other: dict[str, Any]) -> None:
    (seen,) = with_sessions(CLOCK, "reports", [holder()], {1}, found(row("1-reports", **other)))
    assert (seen.host, seen.pid, seen.label, seen.user) == ("ETL1", 4242, ".Net SqlClient Data Provider", "etl")
    assert seen.session_id == other.get("session", 57)
    assert seen.token == seen.session_us == other.get("session_us", BEGAN + 58)
    assert not seen.recorded
    assert seen.needs_kill


def test_a_stale_row_stays_stale() -> None:
    stale = holder(state=SlotState.STALE)
    assert with_sessions(CLOCK, "reports", [stale], {1}, found(row("2-reports"))) == [
        stale,
        *with_sessions(CLOCK, "reports", [], {1}, found(row("2-reports"))),
    ]


def test_what_the_views_do_not_surely_show_stays_as_the_row_says() -> None:
    mine = holder(name=LONG)
    locks = found(row(f"1-{LONG}", 58), row(f"1-{LONG}:2", 59, hash_="0badcafe"))
    assert with_sessions(CLOCK, LONG, [mine], {1}, locks) == [mine]


def test_slots_beyond_the_rows_are_shown() -> None:
    locks = found(row("5-reports", 58))
    first, fifth = with_sessions(CLOCK, "reports", [holder()], {1, 2, 3}, locks)
    assert (first.slot, fifth.slot, fifth.session_id, fifth.login) == (1, 5, 58, "etl")


def test_the_query_parses() -> None:
    assert faults(reading.QUERY) == []


# --- Refusals ---


def refused(text: str) -> str:
    error = ProgrammingError(text)
    error.__cause__ = Exception("42000", text)
    return reading.refusal(error)


@pytest.mark.parametrize(
    "text",
    [
        "[42000] VIEW SERVER STATE permission was denied on object 'server', database 'master'. (300)",
        "[42000] The user does not have permission to perform this action. (297)",
        "[42000] VIEW DATABASE STATE permission denied in database 'app'. (262)",
        "VIEW SERVER PERFORMANCE STATE permission was denied on object 'server', database 'master'.",
    ],
)
def test_without_the_right_one_line_says_so(text: str) -> None:
    line = "Only holders and waiters that keep a row are shown: the login may not VIEW SERVER STATE."
    assert refused(text) == line


def test_without_the_views_one_line_says_so() -> None:
    line = "Only holders and waiters that keep a row are shown: this server does not show its locks."
    assert refused("[42S02] Invalid object name 'sys.dm_tran_locks'. (208)") == line


def test_any_other_refusal_is_quoted() -> None:
    assert refused("Something\n else (1)").endswith("are shown: Something else (1)")


def test_a_session_that_ended_is_no_refusal() -> None:
    assert refused("the session was killed (596)") == ""
