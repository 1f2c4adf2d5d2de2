"""Whatever programs pass to the stored procedures, and whatever procedures of another hand answer.

No call leaves a lock or a row behind that it was not granted, each error names the value, and the session goes on.
``SQLSEM_TEST_EXAMPLES`` says how many calls are tried.
"""

from __future__ import annotations

import functools
import os

import pytest
from django.db import connections
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from django_sqlsem import BackendError, semaphore
from django_sqlsem.backends.applock import calls, install
from django_sqlsem.core.names import validate_name
from django_sqlsem.database.sqlserver import lock_names
from django_sqlsem.models import SemaphoreRow, SlotRow
from tests.backends.applock import procedures
from tests.backends.applock.plain import ALIAS, skip_unless_covered
from tests.backends.applock.procedures import Program
from tests.support import tds
from tests.support.databases import delete_rows, held_rows
from tests.support.threads import wait_until

skip_unless_covered()

MANY = settings(
    deadline=None,
    max_examples=int(os.environ.get("SQLSEM_TEST_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
INTEGERS = st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.one_of(st.none(), st.integers(-3, 12), st.sampled_from([9_999, 10_000, 10_001]), INTEGERS)
LABELS = st.one_of(st.none(), st.text(max_size=300))
TAKES = st.one_of(st.just(1), NUMBERS)
PIECES = st.sampled_from(["x", "\u00e9", "\u540d", "\U0001f512", " ", "'", "]", "%", "\t", "\u202e"])
NAMES = st.one_of(
    st.none(),
    st.text(max_size=20),
    st.text(alphabet="0123456789-: ", max_size=12),
    st.builds(lambda piece, times: piece * times, PIECES, st.integers(0, 260)),
    st.sampled_from(["sqlsem:g:reports", "1-reports", "N'x'; DROP TABLE sqlsem_slot; --", "[a]", "a\0b", "NULL"]),
)
ACQUIRE = """
SET NOCOUNT ON;
EXEC sqlsem.acquire @name = ?, @slots = ?, @timeout_ms = ?, @label = ?, @take = ?, @answer = 1
"""
CALL = "SET NOCOUNT ON; EXEC sqlsem.{} @name = ?, @slot = ?, @answer = 1"


@pytest.fixture
def program(committed):
    made = Program()
    procedures.warm_up(made)
    delete_rows(ALIAS)
    yield made
    made.close()
    install.install(connections[ALIAS])


def can_be_sent(*texts):
    """Whether the server can be asked at all: a stand-in's texts end at a NUL character."""
    return not (tds.is_stand_in(ALIAS) and any("\0" in (text or "") for text in texts))


def holds_nothing(program, name):
    """Whether a session has neither a slot of a name, nor the name, nor its gate."""
    names = lock_names(name)
    return {program.mode(each) for each in (names.base, names.gate, names.slot(1), names.slot(2))} == {"NoLock"}


def told(call):
    """Return what the server says of a call that it refuses."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the driver raises
        call()
    return str(caught.value)


def wrong(name, slots=None, take=1, timeout=0):
    """Return what a message must say of arguments that make no sense, or nothing."""
    try:
        validate_name(name)
    except (TypeError, ValueError):
        return "@name must "
    if slots is not None and not 1 <= slots <= 10_000:
        return f"@slots is {slots}: it must be from 1 to 10000"
    if take is None or not 1 <= take <= 10_000:
        return f"@take is {'NULL' if take is None else take}: it must be from 1 to @slots"
    if timeout is not None and timeout < 0:
        return f"@timeout_ms is {timeout}: it must be 0 or more"
    return f"@take is {take}, and there are {slots or 1} slots." if take > (slots or 1) else ""


@MANY
@given(
    name=NAMES,
    slots=NUMBERS,
    take=TAKES,
    timeout=NUMBERS,
    label=LABELS,
)
def test_acquire(program, name, slots, take, timeout, label):
    assume(can_be_sent(name, label))
    if slots is not None and 50 < slots <= 10_000:
        take = min(take or 0, 1)  # thousands of rows take long
    call = functools.partial(program.rows, ACQUIRE, name, slots, timeout, label, take)
    expected = wrong(name, slots, take, timeout)
    if expected:
        assert expected in told(call)
    else:
        [(rc, slot, taken, token, waited)] = call()
        assert (rc, waited) == (0, 0)
        assert token > 0
        assert sorted(int(each) for each in taken.split(",") if each)[0] == slot
        assert {each.semaphore.name for each in held_rows(ALIAS)} == {name}
        assert len(held_rows(ALIAS)) == take
        assert program.rows(CALL.format("release"), name, None)[0][0] == take
    assert expected.startswith("@name") or holds_nothing(program, name)
    assert held_rows(ALIAS) == []
    delete_rows(ALIAS)


@MANY
@given(name=NAMES, slot=NUMBERS)
@pytest.mark.parametrize("procedure", ["release", "prove"])
def test_release_and_prove(program, procedure, name, slot):
    """With what is another's or nobody's; what is ours stays."""
    assume(can_be_sent(name))
    if not held_rows(ALIAS):
        program.acquire("ours", 2)
    call = functools.partial(program.rows, CALL.format(procedure), name, slot)
    possible = procedure == "release" if slot is None else 1 <= slot <= 10_000
    if wrong(name):
        assert wrong(name) in told(call)
    elif possible:
        call()
    else:
        assert f"@slot is {'NULL' if slot is None else slot}: it must be from 1 to 10000" in told(call)
    assert program.mode(lock_names("ours").slot(1)) == "Exclusive"
    assert len(held_rows(ALIAS)) == 1


@MANY
@given(name=NAMES)
def test_status(program, name):
    assume(can_be_sent(name))
    call = functools.partial(program.rows, "EXEC sqlsem.status ?", name)
    assert "@name must " in told(call) if name is not None and wrong(name) else call() == []
    assert not SemaphoreRow.objects.using(ALIAS).exists()


# --- Procedures of another hand ---

ANSWERS = ["SELECT 1 AS one", "SELECT CONTEXT_INFO() AS stamp", "SET NOCOUNT ON", "SELECT 1 AS result WHERE 1 = 0"]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("procedure", ["internal_try_1", "internal_release_1", "internal_declare_1"])
def test_another_answer_is_told(program, procedure, answer):
    """What a lock may have got by it is free in the end, and no other error comes through."""
    lock = semaphore("shapes", slots=2, timeout=0, using=ALIAS)
    if procedure != "internal_declare_1":
        lock.acquire().release()
    head = calls.files()[procedure].partition("\nAS\n")[0]
    # As the package installs them: a stand-in knows no CREATE OR ALTER.
    program.do(f"{head}\nAS\n{answer}".replace("CREATE OR ALTER", "ALTER"))
    with pytest.raises(BackendError, match="its stored procedures are not those of this version"):
        lock.acquire().release()
    install.install(connections[ALIAS])
    for _ in range(2):
        with lock as permit:
            assert permit.check() is None
    wait_until(lambda: not SlotRow.objects.using(ALIAS).filter(expires_us__isnull=False).exists(), what="all is free")
