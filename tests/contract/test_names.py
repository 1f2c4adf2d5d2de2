"""Names: any Unicode, exact on every database whatever its collation, and one kind each."""

from __future__ import annotations

import contextlib
import threading
import unicodedata
from types import SimpleNamespace

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from django_sqlsem import (
    AlreadyHeldError,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.locks import rlock
from django_sqlsem.runtime.keepers import keeper_for
from tests.support import databases
from tests.support.databases import held_rows
from tests.support.threads import wait_until

#: Names that some collation, trimming, normalisation or encoding takes for one another.
ALIKE = [
    ("case", ["reports", "Reports", "REPORTS"]),
    ("case beyond ascii", ["straße", "STRASSE", "strasse", "Straße", "STRAẞE"]),
    ("dotted i", ["i", "İ", "ı", "I", "i̇"]),
    ("final sigma", ["ς", "σ", "Σ"]),
    ("accents", ["cafe", "café", "cafe\u0301", "cafè"]),
    ("angstrom", ["\u212b", "\u00c5", "A\u030a"]),
    ("order of combining marks", ["q\u0307\u0323", "q\u0323\u0307"]),
    ("compatibility", ["ﬁ", "fi", "①", "1", "x²", "x2"]),
    ("width", ["Ａ", "A", "ア", "ｱ"]),
    ("trailing blanks", ["a", "a ", "a  ", "a\t", "a\n", "a\u00a0", "a\u3000"]),
    ("leading blanks", ["a", " a", "\ta", "\ufeffa"]),
    ("only blanks", [" ", "  ", "\t", "\n", "\r", "\r\n", "\u200b", "\u2028", "\u00a0"]),
    ("ignorable", ["ab", "a\u00adb", "a\u200bb", "a\u200db", "a\u034fb", "a\ufe0fb"]),
    ("emoji", ["🔒", "🔓", "👩", "👩‍💻", "👩🏽‍💻", "👩🏿‍💻", "❤", "❤️"]),
    ("beyond the first plane", ["𝒜", "A", "𐐨", "𐐀", "\U0010ffff", "\U0010fffe"]),
    ("right to left", ["שלום", "םולש", "\u202eabc", "abc", "\u200fabc", "مرحبا", "مَرحَبا"]),
    ("hangul", ["각", "\u1100\u1161\u11a8"]),
    ("kana", ["は", "ば", "ぱ", "ハ", "は\u3099"]),
    ("control characters", ["a\x01", "a\x02", "a\x1f", "a\x7f", "a\x80", "a\x9f", "\x1b[0m"]),
    ("not characters", ["\ufffe", "\uffff", "\ufffd", "\ufdd0"]),
    ("sql", ["%", "%%", "%s", "%(key)s", "_", "\\", "\\\\", "'", "''", '"', "`", "{now}", "x'; --", "?", ":1"]),
    ("patterns", ["*", "[a]", "a", "{a}", "{{a}}"]),
    ("numbers", ["1", "01", "1.0", "1-x", "٣", "3"]),
    ("words", ["NULL", "None", "null", "TRUE", "0"]),
    ("longest", ["\U0001f512" * 200, "\U0001f512" * 199, "\U0001f513" + "\U0001f512" * 199,
                 "\U0001f512" * 199 + "\U0001f513", "x" * 200, "x" * 199 + "X", "e\u0301" * 100, "é" * 200]),
]  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(a, id=databases.label(a)) for a in databases.covered()])
def searched(request, django_db_setup, django_db_blocker):
    """One alias after the other for many examples: a function's fixture would serve the first of them only."""
    from tests.conftest import _stop_library

    with django_db_blocker.unblock():
        yield request.param
        _stop_library()
        databases.assert_nothing_held(request.param)
        databases.delete_rows(request.param)
        connections.close_all()


def exactly(name):
    """A name that a string would make a template of is given in parts, which are taken as they are."""
    return (name,) if "{" in name and not {":", "\\"} & set(name) else name


@pytest.mark.parametrize("names", [pytest.param(names, id=title) for title, names in ALIKE])
def test_names_that_look_alike_are_not_one(searched, names):
    databases.delete_rows(searched)
    with contextlib.ExitStack() as stack:
        for name in names:
            permit = stack.enter_context(semaphore(exactly(name), slots=1, timeout=0, using=searched))
            assert permit.name == name
        assert sorted(row.semaphore.name for row in held_rows(searched)) == sorted(names)
        assert [snapshot.name for snapshot in queries.semaphores(using=searched)] == sorted(names)
        for name in names:
            assert semaphore(exactly(name), using=searched).status().name == name
            found = queries.semaphore(name, using=searched)
            assert (found.name, found.held, found.holders[0].name) == (name, 1, name)
    assert queries.holders(using=searched) == []


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
LONG = st.builds(
    lambda character, rest: (character * 200)[: 200 - len(rest)] + rest,
    st.characters(min_codepoint=0x10000),
    st.text(st.characters(min_codepoint=0x10000), max_size=3),
)
NAMES = st.one_of(TEXT, LONG)

#: What a careless database or library may do to a name.
CHANGES = [
    str.lower,
    str.upper,
    str.swapcase,
    str.casefold,
    str.strip,
    lambda name: f"{name} ",
    lambda name: f" {name}",
    lambda name: f"{name}\u0301",
    lambda name: f"{name}\u200d",
    lambda name: f"{name}%",
    lambda name: name[::-1],
    lambda name: name[:-1],
    lambda name: name.replace("\\", "\\\\"),
    lambda name: name.encode("latin-1", "replace").decode("latin-1"),
    lambda name: name.encode("utf-16-le")[:-2].decode("utf-16-le", "replace"),
    *(lambda name, form=form: unicodedata.normalize(form, name) for form in ("NFC", "NFD", "NFKC", "NFKD")),
]
PAIRS = st.one_of(
    st.builds(lambda name, change: (name, change(name)), NAMES, st.sampled_from(CHANGES)),
    st.tuples(NAMES, NAMES),
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(pair=PAIRS)
def test_different_names_never_collide_and_the_same_always_does(searched, pair):
    one, other = pair
    assume(1 <= len(other) <= 200 and "\0" not in other)
    lock = semaphore(exactly(one), slots=1, timeout=0, using=searched)
    with lock as permit:
        assert permit.name == one
        if other == one:
            with pytest.raises(AlreadyHeldError):
                semaphore(exactly(other), slots=1, using=searched).acquire()
            permit.detach()
            assert semaphore(exactly(other), slots=1, using=searched).try_acquire() is None
        else:
            with semaphore(exactly(other), slots=1, timeout=0, using=searched) as second:
                assert second.name == other
                found = queries.by_name([one, other], using=searched)
                assert {name: snapshot.held for name, snapshot in found.items()} == {one: 1, other: 1}
            permit.detach()
            assert semaphore(exactly(one), slots=1, using=searched).try_acquire() is None
        assert lock.status().name == one
        assert one in {snapshot.name for snapshot in queries.semaphores(using=searched)}


def test_a_waiter_of_the_wrong_kind_is_told_so(database):
    held = rlock("x", using=database).acquire()
    held.detach()
    outcomes = []

    def wait(lock):
        try:
            lock.acquire(timeout=20).release()
            outcomes.append("granted")
        except ImproperlyConfigured as error:
            outcomes.append(str(error))
        finally:
            connections.close_all()

    patient = threading.Thread(target=wait, args=(rlock("x", using=database),))
    patient.start()
    wait_until(lambda: semaphore("x", using=database).status().waiting == 1)
    wait_until(lambda: keeper_for(get_backend(database)).queues)  # else the next one asks the database by itself
    wrong = threading.Thread(target=wait, args=(mutex("x", using=database),))
    wrong.start()
    wait_until(lambda: semaphore("x", using=database).status().waiting == 2)
    held.release()
    patient.join(10)
    wrong.join(10)
    refused, granted = sorted(outcomes)
    assert granted == "granted"
    assert refused.startswith("'x' is an rlock already and can't be used as a mutex. ")


@pytest.fixture
def latin1(committed):
    """An alias of a MariaDB or MySQL database whose own character set is latin1, made by the migrations."""
    if "mariadb" not in connections.settings:
        pytest.skip("no MariaDB")
    template = connections["mariadb"]
    name = f"{template.settings_dict['NAME']}_latin1"
    with template.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET latin1 COLLATE latin1_swedish_ci")
    connections.settings["latin1"] = {**template.settings_dict, "NAME": name}
    try:
        call_command("migrate", "sqlsem", database="latin1", verbosity=0)
        yield "latin1"
    finally:
        from tests.conftest import _stop_library

        _stop_library()
        connections["latin1"].close()
        del connections["latin1"], connections.settings["latin1"]
        with template.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


def test_a_latin1_database_stores_all_names(latin1):
    with connections[latin1].cursor() as cursor:
        cursor.execute("SELECT @@character_set_database")
        assert cursor.fetchone() == ("latin1",)
    names = sorted({name for _, alike in ALIKE for name in alike})
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(semaphore(exactly(name), slots=1, timeout=0, using=latin1))
        assert [snapshot.name for snapshot in queries.semaphores(using=latin1)] == names
        assert {holder.name for holder in queries.holders(using=latin1)} == set(names)
        for name in names:
            assert semaphore(exactly(name), using=latin1).status().held == 1


def test_a_latin1_database_compares_by_code_points(latin1):
    with connections[latin1].cursor() as cursor:
        for table in ("sqlsem_semaphore", "sqlsem_slot", "sqlsem_waiter"):
            cursor.execute(f"SHOW FULL COLUMNS FROM {table}")
            rows = [SimpleNamespace(name=row[0], collation=row[2]) for row in cursor.fetchall()]
            assert {row.collation for row in rows if row.collation} == {"utf8mb4_bin"}


def test_what_a_holder_says_of_itself_is_stored_whatever_it_is(latin1):
    label, user = "🔒" * 300, "Ωμέγα\0\ud800" * 40
    from django_sqlsem.core import identity

    with identity.activity(label, user), semaphore("x", using=latin1):
        (holder,) = queries.holders(using=latin1)
    assert holder.label == "🔒" * 200
    assert holder.user == ("Ωμέγα?" * 40)[:150]
