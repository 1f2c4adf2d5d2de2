# ruff: noqa: PT017 - what hypothesis tries may be taken or refused, so that pytest.raises() does not fit
"""Wrong arguments and settings: each is refused by the call that made it, in a message of its own."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import fractions
import math
import re
import uuid
from http import HTTPStatus

import pytest
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import connections
from django.test import override_settings
from django.utils.safestring import SafeString, mark_safe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_sqlsem import (
    InvalidSemaphoreBackendError,
    control,
    mutex,
    queries,
    semaphore,
    testing,
)
from django_sqlsem.backends import database_for, get_backend
from django_sqlsem.backends.rows.backend import RowsBackend
from django_sqlsem.checks.settings import check_settings
from django_sqlsem.conf import KEYS, config
from django_sqlsem.core.names import joined
from tests.support.databases import held_rows

NAN, INFINITY = math.nan, math.inf
#: So many digits that Python refuses to write it out.
ENORMOUS = 10**5000
BUSY = (
    "on_busy must be an HTTP error status from 400 to 599, 'raise', 'skip', 'retry', a callable that takes a Busy, "
    "or None for what suits the call, not "
)
TIMEOUT = "timeout must be seconds (a number) or a timedelta, or None for no limit, not "
LEASE = "lease must be seconds (a number) or a timedelta, not "
MAX_HOLD = "max_hold must be seconds (a number) or a timedelta, not "


class Unspeakable:
    """An object whose ``repr()`` fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Colour(str, enum.Enum):  # noqa: UP042 - on purpose: its str() is not its value
    """Text whose ``str()`` is something else."""

    RED = "red"


def cases(*rows):
    """Make parameters with readable ids of rows that begin with one."""
    return [pytest.param(*rest, id=name) for name, *rest in rows]


def exactly(message):
    """Return a pattern that matches just this message."""
    return f"^{re.escape(message)}$"


NOT_A_NAME = "A semaphore's name must be a str or a tuple of parts, not "
NOT_A_PART = "A part of a semaphore's name must be a str, an int, a UUID or a date, not "

NAMES = cases(
    ("none", None, TypeError, NOT_A_NAME + "None of type NoneType."),
    ("int", 7, TypeError, NOT_A_NAME + "7 of type int."),
    ("bytes", b"reports", TypeError, NOT_A_NAME + "b'reports' of type bytes."),
    ("long bytes", b"x" * 500, TypeError, NOT_A_NAME + f"b'{'x' * 95}... of type bytes."),
    ("function", len, TypeError, NOT_A_NAME + "<built-in function len> of type "
     "builtin_function_or_method."),
    ("unspeakable", Unspeakable(), TypeError, NOT_A_NAME + "<Unspeakable> of type "
     "Unspeakable."),
    ("empty", "", ValueError, "A semaphore's name must have 1 to 200 characters, not 0: ''."),
    ("201", "x" * 201, ValueError, f"A semaphore's name must have 1 to 200 characters, not 201: '{'x' * 57}...'."),
    ("201 emoji", "🔒" * 201, ValueError, "A semaphore's name must have 1 to 200 characters, not 201: "
     f"'{'🔒' * 57}...'."),
    ("nul", "a\0b", ValueError, "A semaphore's name must not contain a NUL character: 'a\\x00b'."),
    ("list", ["a", "b"], TypeError, NOT_A_NAME + "['a', 'b'] of type list."),
    ("no parts", (), ValueError, "A semaphore's name must have at least one part, not none."),
    ("empty part", ("a", ""), ValueError, "A part of a semaphore's name must not be empty: ('a', '')."),
    ("part none", ("a", None), TypeError, NOT_A_PART + "None of type NoneType."),
    ("part bool", ("a", True), TypeError, NOT_A_PART + "True of type bool."),
    ("part float", (1.5,), TypeError, NOT_A_PART + "1.5 of type float."),
    ("part datetime", (datetime.datetime(1, 1, 1, tzinfo=datetime.UTC),), TypeError, NOT_A_PART + "datetime.datetime("
     "1, 1, 1, 0, 0, tzinfo=datetime.timezone.utc) of type datetime."),
    ("part tuple", ("a", ("b",)), TypeError, NOT_A_PART + "('b',) of type tuple."),
    ("part of a million digits", (1 << 4_000_000,), ValueError, "A part of a semaphore's name must have fewer digits: "
     "<int of 4000001 bits>."),
    ("201 joined", ("x" * 99, ":" * 50 + "y"), ValueError, "A semaphore's name, its parts joined, must have 1 to 200 "
     f"characters, not 201: '{'x' * 57}...'."),
    ("part nul", ("a\0", "b"), ValueError, "A semaphore's name must not contain a NUL character: 'a\\x00:b'."),
    ("surrogate", "a\ud800", ValueError, "A semaphore's name must not contain a lone surrogate: 'a\\ud800'."),
    ("low surrogate", "\udfff", ValueError, "A semaphore's name must not contain a lone surrogate: '\\udfff'."),
)  # fmt: skip

OPTIONS = cases(
    ("slots 0", {"slots": 0}, ValueError, "slots must be from 1 to 10000, not 0."),
    ("slots -1", {"slots": -1}, ValueError, "slots must be from 1 to 10000, not -1."),
    ("slots 10001", {"slots": 10_001}, ValueError, "slots must be from 1 to 10000, not 10001."),
    ("slots enormous", {"slots": ENORMOUS}, ValueError, "slots must be from 1 to 10000, not <int of 16610 bits>."),
    ("slots true", {"slots": True}, TypeError, "slots must be an int from 1 to 10000, not True of type bool."),
    ("slots float", {"slots": 3.0}, TypeError, "slots must be an int from 1 to 10000, not 3.0 of type float."),
    ("slots text", {"slots": "3"}, TypeError, "slots must be an int from 1 to 10000, not '3' of type str."),
    ("slots decimal", {"slots": decimal.Decimal(3)}, TypeError,
     "slots must be an int from 1 to 10000, not Decimal('3') of type Decimal."),
    ("take 0", {"take": 0}, ValueError, "take must be from 1 to 10000, not 0."),
    ("take none", {"take": None}, TypeError, "take must be an int from 1 to 10000, not None of type NoneType."),
    ("take nan", {"take": NAN}, TypeError, "take must be an int from 1 to 10000, not nan of type float."),
    ("take more than slots", {"slots": 2, "take": 3}, ValueError,
     "take must be at most slots=2, not 3: it could never be met."),
    ("timeout -1", {"timeout": -1}, ValueError, "timeout must be from 0 to 1e+09 seconds, not -1."),
    ("timeout nan", {"timeout": NAN}, ValueError,
     "timeout must be a finite number of seconds, not nan. Use None to wait without a limit."),
    ("timeout infinite", {"timeout": INFINITY}, ValueError,
     "timeout must be a finite number of seconds, not inf. Use None to wait without a limit."),
    ("timeout 40 years", {"timeout": datetime.timedelta(days=40 * 365)}, ValueError,
     "timeout must be from 0 to 1e+09 seconds, not datetime.timedelta(days=14600)."),
    ("timeout before", {"timeout": datetime.timedelta(seconds=-1)}, ValueError,
     "timeout must be from 0 to 1e+09 seconds, not datetime.timedelta(days=-1, seconds=86399)."),
    ("timeout enormous", {"timeout": ENORMOUS}, ValueError,
     "timeout must be a finite number of seconds, not <int of 16610 bits>. Use None to wait without a limit."),
    ("timeout true", {"timeout": True}, TypeError, f"{TIMEOUT}True of type bool."),
    ("timeout text", {"timeout": "5"}, TypeError, f"{TIMEOUT}'5' of type str."),
    ("timeout decimal", {"timeout": decimal.Decimal("0.5")}, TypeError, f"{TIMEOUT}Decimal('0.5') of type Decimal."),
    ("timeout fraction", {"timeout": fractions.Fraction(1, 2)}, TypeError,
     f"{TIMEOUT}Fraction(1, 2) of type Fraction."),
    ("timeout complex", {"timeout": 1j}, TypeError, f"{TIMEOUT}1j of type complex."),
    ("lease 0.5", {"lease": 0.5}, ValueError, "lease must be from 1 to 1e+09 seconds, not 0.5."),
    ("lease 0", {"lease": 0}, ValueError, "lease must be from 1 to 1e+09 seconds, not 0."),
    ("lease infinite", {"lease": INFINITY}, ValueError, "lease must be a finite number of seconds, not inf."),
    ("lease text", {"lease": "1m"}, TypeError, f"{LEASE}'1m' of type str."),
    ("lease false", {"lease": False}, TypeError, f"{LEASE}False of type bool."),
    ("max_hold 0", {"max_hold": 0}, ValueError, "max_hold must be from 1 to 1e+09 seconds, not 0."),
    ("max_hold nan", {"max_hold": NAN}, ValueError, "max_hold must be a finite number of seconds, not nan."),
    ("max_hold list", {"max_hold": [1]}, TypeError, f"{MAX_HOLD}[1] of type list."),
    ("on_busy 200", {"on_busy": 200}, ValueError, f"{BUSY}200."),
    ("on_busy 600", {"on_busy": HTTPStatus.OK}, ValueError, f"{BUSY}<HTTPStatus.OK: 200>."),
    ("on_busy enormous", {"on_busy": ENORMOUS}, ValueError, f"{BUSY}<int of 16610 bits>."),
    ("on_busy word", {"on_busy": "wait"}, ValueError, f"{BUSY}'wait'."),
    ("on_busy case", {"on_busy": "Raise"}, ValueError, f"{BUSY}'Raise'."),
    ("on_busy true", {"on_busy": True}, TypeError, f"{BUSY}True of type bool."),
    ("on_busy float", {"on_busy": 503.0}, TypeError, f"{BUSY}503.0 of type float."),
    ("on_busy bytes", {"on_busy": b"skip"}, TypeError, f"{BUSY}b'skip' of type bytes."),
    ("key text", {"key": "pk"}, TypeError, "key must be a callable or None, not 'pk'."),
    ("key unspeakable", {"key": Unspeakable()}, TypeError, "key must be a callable or None, not <Unspeakable>."),
    ("on_lost text", {"on_lost": "stop"}, TypeError, "on_lost must be a callable or None, not 'stop'."),
    ("release word", {"release": "on_close"}, ValueError, "release must be 'on_exit' or 'on_commit', not 'on_close'."),
    ("release none", {"release": None}, ValueError, "release must be 'on_exit' or 'on_commit', not None."),
    ("release list", {"release": []}, ValueError, "release must be 'on_exit' or 'on_commit', not []."),
    ("fair 1", {"fair": 1}, TypeError, "fair must be True or False, not 1."),
    ("fair none", {"fair": None}, TypeError, "fair must be True or False, not None."),
    ("using int", {"using": 0}, TypeError, "using must be the alias of a database or None, not 0."),
    ("using list", {"using": ["default"]}, TypeError,
     "using must be the alias of a database or None, not ['default']."),
)  # fmt: skip


@pytest.mark.parametrize(("name", "error", "message"), NAMES)
@pytest.mark.parametrize("make", [semaphore, mutex])
def test_names(make, name, error, message):
    if callable(name):  # the decorator without its name
        message = 'A semaphore\'s name must be given before it decorates a function: @semaphore("reports").'
    with pytest.raises(error, match=exactly(message)):
        make(name)


@pytest.mark.parametrize(("name", "error", "message"), NAMES)
@pytest.mark.parametrize(
    "call",
    [
        queries.semaphore,
        lambda name: control.revoke(name, by="ann"),
        lambda name: control.set_slots(name, 2, by="ann"),
        lambda name: control.pause(name, by="ann"),
        lambda name: control.resume(name, by="ann"),
        lambda name: testing.busy(name).__enter__(),
        lambda name: testing.held(name).__enter__(),
        lambda name: testing.lost(name).__enter__(),
    ],
    ids=["queries", "revoke", "set_slots", "pause", "resume", "busy", "held", "lost"],
)
def test_names_that_operators_and_tests_give(call, name, error, message):
    with pytest.raises(error, match=exactly(message)):
        call(name)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_options(options, error, message):
    with pytest.raises(error, match=exactly(message)):
        semaphore("reports", **options)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_options_of_a_mutex(options, error, message):
    if {"slots", "take"} & options.keys():
        message = r"^(slots|take)=.{1,110} is not for a mutex, which has one slot: use semaphore\(\)\.$"
        error = TypeError
    else:
        message = exactly(message)
    with pytest.raises(error, match=message):
        mutex("reports", **options)


@pytest.mark.parametrize("make", [semaphore, mutex])
def test_an_unknown_option(make):
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot'"):
        make("reports", slot=3)


def test_options_but_name_and_slots_are_by_keyword_only():
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        semaphore("reports", 3, 1)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        mutex("reports", 1)


BAD_TIMEOUTS = [param for param in OPTIONS if param.id.startswith("timeout")]


@pytest.mark.parametrize(("options", "error", "message"), BAD_TIMEOUTS)
def test_a_timeout_given_to_acquire(committed, options, error, message):
    lock = mutex("reports")
    with pytest.raises(error, match=exactly(message)):
        lock.acquire(**options)
    with pytest.raises(error, match=exactly(message)):
        asyncio.run(lock.aacquire(**options))
    assert held_rows("default") == []
    assert queries.semaphore("reports") is None


def test_on_lost_of_a_permit(committed):
    with mutex("reports") as permit, pytest.raises(TypeError, match=exactly("on_lost takes a callable, not 'stop'.")):
        permit.on_lost("stop")


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    cases(
        ("0", 0, ValueError, "slots must be from 1 to 10000, not 0."),
        ("text", "3", TypeError, "slots must be an int from 1 to 10000, not '3' of type str."),
        ("true", True, TypeError, "slots must be an int from 1 to 10000, not True of type bool."),
    ),
)
def test_slots_that_operators_and_tests_give(slots, error, message):
    with pytest.raises(error, match=exactly(message)):
        control.set_slots("reports", slots, by="ann")
    with pytest.raises(error, match=exactly(message)):
        testing.held("reports", slots).__enter__()
    with pytest.raises(error, match=exactly(message)):
        testing.held("reports", total=slots).__enter__()


@pytest.mark.parametrize(
    ("function", "name", "message"),
    cases(
        ("unknown argument", lambda a: a, "x:{b}",
         "The semaphore's name 'x:{b}' has a field of the argument 'b', which <lambda>() does not take; it takes a."),
        ("no argument", lambda: 0, "x:{b}",
         "The semaphore's name 'x:{b}' has a field of the argument 'b', which <lambda>() does not take; "
         "it takes none at all."),
        ("position", lambda a: a, "x:{}",
         "The field '{}' of the semaphore's name 'x:{}' has no name; fields are never positional."),
        ("conversion", lambda a: a, "x:{a!r}",
         "The field '{a!r}' of the semaphore's name 'x:{a!r}' has a conversion or a format; only plain attributes are "
         "allowed."),
        ("index", lambda a: a, "x:{a[0]}",
         "The field '{a[0]}' of the semaphore's name 'x:{a[0]}' has an index; only plain attributes are allowed."),
        ("private", lambda a: a, "x:{a.__class__}",
         "The field '{a.__class__}' of the semaphore's name 'x:{a.__class__}' has a leading underscore, which is "
         "private."),
        ("number", lambda a: a, "x:{0}",
         "The field '{0}' of the semaphore's name 'x:{0}' is not an argument's name, with or without attributes."),
        ("single brace", lambda a: a, "x:}",
         "The semaphore's name 'x:}' has a single '}' at character 3; in a decorator write '}}' for the character "
         "itself."),
    ),
)  # fmt: skip
def test_templates_are_refused_where_they_decorate(function, name, message):
    with pytest.raises(ValueError, match=exactly(message)):
        semaphore(name)(function)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    cases(
        ("none", None, ValueError,
         "The field 'a' of the semaphore's name 'x:{a}' is None in this call. Everybody without a value would share "
         "one lock."),
        ("empty", "", ValueError, "The field 'a' of the semaphore's name 'x:{a}' is empty in this call."),
        ("nul", "\0", ValueError, "A semaphore's name must not contain a NUL character: 'x:\\x00'."),
        ("long", "y" * 199, ValueError,
         f"A semaphore's name must have 1 to 200 characters, not 201: 'x:{'y' * 55}...'."),
    ),
)  # fmt: skip
def test_templates_are_refused_by_the_call_that_fills_them_in(value, error, message):
    called = []
    decorated = semaphore("x:{a}")(lambda a: called.append(a))
    with pytest.raises(error, match=exactly(message)):
        decorated(value)
    assert not called


KEYS_OF_AN_ALIAS = (
    "BACKEND", "BEACONS", "CITUS", "DEADLOCKS", "DURABLE", "FORGET_AFTER",
    "HISTORY", "HOSTS", "IDLE", "LEASE", "RECORD", "TIMEOUT",
)  # fmt: skip
SETTINGS = cases(
    ("list", [], "SQLSEM must be a dict, not []."),
    ("none", None, "SQLSEM must be a dict, not None."),
    ("unknown", {"TIMOUT": 3}, f"SQLSEM has an unknown key 'TIMOUT'; allowed are {', '.join(KEYS)}."),
    ("lower case", {"timeout": 3}, f"SQLSEM has an unknown key 'timeout'; allowed are {', '.join(KEYS)}."),
    ("no text", {3: 3}, f"SQLSEM has an unknown key 3; allowed are {', '.join(KEYS)}."),
    ("DATABASE unknown", {"DATABASE": "locks"},
     "SQLSEM['DATABASE'] is 'locks', which is not in DATABASES: {aliases}."),
    ("DATABASE empty", {"DATABASE": ""}, "SQLSEM['DATABASE'] must be a non-empty str or None, not ''."),
    ("DATABASE number", {"DATABASE": 1}, "SQLSEM['DATABASE'] must be a non-empty str or None, not 1."),
    ("BACKEND class", {"BACKEND": RowsBackend}, "SQLSEM['BACKEND'] must be a non-empty str or None, not "
     "<class 'django_sqlsem.backends.rows.backend.RowsBackend'>."),
    ("BACKEND empty", {"BACKEND": ""}, "SQLSEM['BACKEND'] must be a non-empty str or None, not ''."),
    ("TIMEOUT text", {"TIMEOUT": "30"}, f"SQLSEM['TIMEOUT'] {TIMEOUT[8:]}'30' of type str."),
    ("TIMEOUT -1", {"TIMEOUT": -1}, "SQLSEM['TIMEOUT'] must be from 0 to 1e+09 seconds, not -1."),
    ("TIMEOUT nan", {"TIMEOUT": NAN}, "SQLSEM['TIMEOUT'] must be a finite number of seconds, not nan. "
     "Use None to wait without a limit."),
    ("VIEW_TIMEOUT true", {"VIEW_TIMEOUT": True}, f"SQLSEM['VIEW_TIMEOUT'] {TIMEOUT[8:]}True of type bool."),
    ("VIEW_TIMEOUT -1", {"VIEW_TIMEOUT": -1}, "SQLSEM['VIEW_TIMEOUT'] must be from 0 to 1e+09 seconds, not -1."),
    ("VIEW_MAX_WAITING text", {"VIEW_MAX_WAITING": "many"},
     "SQLSEM['VIEW_MAX_WAITING'] must be an int from 0 or None, not 'many' of type str."),
    ("VIEW_MAX_WAITING -1", {"VIEW_MAX_WAITING": -1}, "SQLSEM['VIEW_MAX_WAITING'] must be from 0 or None, not -1."),
    ("TASK_TIMEOUT text", {"TASK_TIMEOUT": ""}, f"SQLSEM['TASK_TIMEOUT'] {TIMEOUT[8:]}'' of type str."),
    ("TASK_TIMEOUT -1", {"TASK_TIMEOUT": -1}, "SQLSEM['TASK_TIMEOUT'] must be from 0 to 1e+09 seconds, not -1."),
    ("LEASE none", {"LEASE": None}, f"SQLSEM['LEASE'] {LEASE[6:]}None of type NoneType."),
    ("LEASE 0.9", {"LEASE": 0.9}, "SQLSEM['LEASE'] must be from 1 to 1e+09 seconds, not 0.9."),
    ("IDLE none", {"IDLE": None}, f"SQLSEM['IDLE'] {LEASE[6:]}None of type NoneType."),
    ("IDLE -1", {"IDLE": -1}, "SQLSEM['IDLE'] must be from 0 to 1e+09 seconds, not -1."),
    ("BUSY_STATUS 200", {"BUSY_STATUS": 200},
     "SQLSEM['BUSY_STATUS'] must be an HTTP error status from 400 to 599, not 200."),
    ("BUSY_STATUS text", {"BUSY_STATUS": "503"},
     "SQLSEM['BUSY_STATUS'] must be an HTTP error status from 400 to 599, not '503'."),
    ("BUSY_STATUS true", {"BUSY_STATUS": True},
     "SQLSEM['BUSY_STATUS'] must be an HTTP error status from 400 to 599, not True."),
    ("HOSTS of all", {"HOSTS": ["db1"]},
     "SQLSEM['HOSTS'] is about one database: it must be in SQLSEM['DATABASES']."),
    ("HOSTS text", {"DATABASES": {"default": {"HOSTS": "db1,db2"}}},
     "SQLSEM['DATABASES']['default']['HOSTS'] must be a list of hosts, like ['db1', 'db2:3307'], not 'db1,db2'."),
    ("HOSTS none", {"DATABASES": {"default": {"HOSTS": []}}},
     "SQLSEM['DATABASES']['default']['HOSTS'] must be a list of hosts, like ['db1', 'db2:3307'], not []."),
    ("HOSTS of SQLite", {"DATABASES": {"default": {"HOSTS": ["db1"]}}},
     "SQLSEM['DATABASES']['default']['HOSTS'] is for MySQL and MariaDB: PostgreSQL takes several in HOST, other "
     "databases have one."),
    ("DATABASES list", {"DATABASES": ["default"]},
     "SQLSEM['DATABASES'] must map aliases to dicts, not ['default']."),
    ("DATABASES none", {"DATABASES": None}, "SQLSEM['DATABASES'] must map aliases to dicts, not None."),
    ("DATABASES of text", {"DATABASES": {"default": "x"}},
     "SQLSEM['DATABASES'] must map aliases to dicts, not {{'default': 'x'}}."),
    ("DATABASES unknown", {"DATABASES": {"locks": {}}},
     "SQLSEM['DATABASES'] names 'locks', which is not in DATABASES: {aliases}."),
    ("override unknown", {"DATABASES": {"default": {"LEESE": 3}}},
     "SQLSEM['DATABASES']['default'] has an unknown key 'LEESE'; allowed are "
     f"{', '.join(KEYS_OF_AN_ALIAS)}."),
    ("override of a general one", {"DATABASES": {"default": {"BUSY_STATUS": 503}}},
     "SQLSEM['DATABASES']['default'] has an unknown key 'BUSY_STATUS'; allowed are "
     f"{', '.join(KEYS_OF_AN_ALIAS)}."),
    ("FORGET_AFTER 1", {"FORGET_AFTER": 1}, "SQLSEM['FORGET_AFTER'] must be from 60 to 1e+09 seconds, not 1."),
    ("CITUS of SQLite", {"DATABASES": {"default": {"CITUS": True}}},
     "SQLSEM['DATABASES']['default']['CITUS'] is for PostgreSQL: Citus is an extension of it."),
    ("CITUS 1", {"CITUS": 1}, "SQLSEM['CITUS'] must be True or False, not 1."),
    ("DURABLE", {"DURABLE": None}, "SQLSEM['DURABLE'] must be True or False, not None."),
    ("DEADLOCKS true", {"DEADLOCKS": True},
     "SQLSEM['DEADLOCKS'] must be one of 'report', 'break', 'ignore', not True."),
    ("DEADLOCKS none", {"DEADLOCKS": None},
     "SQLSEM['DEADLOCKS'] must be one of 'report', 'break', 'ignore', not None."),
    ("DEADLOCKS case", {"DEADLOCKS": "Break"},
     "SQLSEM['DEADLOCKS'] must be one of 'report', 'break', 'ignore', not 'Break'."),
    ("DEADLOCKS list", {"DEADLOCKS": ["break"]},
     "SQLSEM['DEADLOCKS'] must be one of 'report', 'break', 'ignore', not ['break']."),
    ("override DEADLOCKS", {"DATABASES": {"default": {"DEADLOCKS": ""}}},
     "SQLSEM['DATABASES']['default']['DEADLOCKS'] must be one of 'report', 'break', 'ignore', not ''."),
    ("BEACONS", {"BEACONS": 1}, "SQLSEM['BEACONS'] must be True or False, not 1."),
    ("HISTORY", {"HISTORY": 1},
     "SQLSEM['HISTORY'] must be True or False, or a dict of GRANTS, ACTS, MINUTES in seconds, not 1."),
    ("HISTORY GRANTS none", {"HISTORY": {"GRANTS": None}},
     f"SQLSEM['HISTORY']['GRANTS'] {LEASE[6:]}None of type NoneType."),
    ("HISTORY unknown", {"HISTORY": {"HOURS": 1}},
     "SQLSEM['HISTORY'] has an unknown key 'HOURS'; allowed are GRANTS, ACTS, MINUTES."),
    ("HISTORY ACTS -1", {"HISTORY": {"ACTS": -1}},
     "SQLSEM['HISTORY']['ACTS'] must be from 0 to 1e+09 seconds, not -1."),
    ("HISTORY MINUTES text", {"HISTORY": {"MINUTES": "7 days"}},
     f"SQLSEM['HISTORY']['MINUTES'] {LEASE[6:]}'7 days' of type str."),
    ("LINKS", {"LINKS": ["task"]}, "SQLSEM['LINKS'] must be a dict of task, trace, logs, not ['task']."),
    ("LINKS unknown", {"LINKS": {"sentry": "https://x/{trace_id}"}},
     "SQLSEM['LINKS'] has an unknown key 'sentry'; allowed are task, trace, logs."),
    ("LINKS script", {"LINKS": {"task": "javascript:alert({task_id})"}},
     "SQLSEM['LINKS']['task'] must be an address that begins with http:// or https://, not"
     " 'javascript:alert({{task_id}})'."),
    ("LINKS type", {"LINKS": {"task": 3}},
     "SQLSEM['LINKS']['task'] must be an address that begins with http:// or https://, not 3."),
    ("LINKS space", {"LINKS": {"task": "https://x/ y"}},
     "SQLSEM['LINKS']['task'] must be an address that begins with http:// or https://, not 'https://x/ y'."),
    ("LINKS field", {"LINKS": {"task": "https://x/{task_id}/{pid}"}},
     "SQLSEM['LINKS']['task'] has a field 'pid'; allowed are {{task_id}}, {{task}}, as they are."),
    ("LINKS attribute", {"LINKS": {"trace": "https://x/{trace_id.__class__}"}},
     "SQLSEM['LINKS']['trace'] has a field 'trace_id.__class__'; allowed are {{trace_id}}, as they are."),
    ("LINKS format", {"LINKS": {"trace": "https://x/{trace_id:>9}"}},
     "SQLSEM['LINKS']['trace'] has a field 'trace_id'; allowed are {{trace_id}}, as they are."),
    ("LINKS none", {"LINKS": {"trace": "https://x/"}},
     "SQLSEM['LINKS']['trace'] needs {{trace_id}}: 'https://x/' has none."),
    ("LINKS brace", {"LINKS": {"trace": "https://x/{trace_id"}},
     "SQLSEM['LINKS']['trace'] is 'https://x/{{trace_id': expected '}}' before end of string. Write {{{{ and }}}} for"
     " braces."),
    ("RECORD", {"RECORD": "yes"}, "SQLSEM['RECORD'] must be True or False, not 'yes'."),
    ("override DURABLE", {"DATABASES": {"default": {"DURABLE": "no"}}},
     "SQLSEM['DATABASES']['default']['DURABLE'] must be True or False, not 'no'."),
    ("override LEASE", {"DATABASES": {"default": {"LEASE": 0}}},
     "SQLSEM['DATABASES']['default']['LEASE'] must be from 1 to 1e+09 seconds, not 0."),
    ("override TIMEOUT", {"DATABASES": {"default": {"TIMEOUT": "1"}}},
     f"SQLSEM['DATABASES']['default']['TIMEOUT'] {TIMEOUT[8:]}'1' of type str."),
    ("override IDLE", {"DATABASES": {"default": {"IDLE": "1"}}},
     f"SQLSEM['DATABASES']['default']['IDLE'] {LEASE[6:]}'1' of type str."),
    ("override BACKEND", {"DATABASES": {"default": {"BACKEND": 1}}},
     "SQLSEM['DATABASES']['default']['BACKEND'] must be a non-empty str or None, not 1."),
)  # fmt: skip


def _with_aliases(message):
    return exactly(message.format(aliases=", ".join(sorted(connections.settings))) if "{" in message else message)


@pytest.mark.parametrize(("value", "message"), SETTINGS)
def test_settings(value, message):
    with override_settings(SQLSEM=value):
        for call in (
            config,
            lambda: config("default"),
            semaphore("reports").acquire,
            semaphore("reports").try_acquire,
            semaphore("reports").status,
            lambda: asyncio.run(semaphore("reports").aacquire()),
            queries.semaphores,
        ):
            with pytest.raises(ImproperlyConfigured, match=_with_aliases(message)):
                call()
        errors = list(check_settings(None))
        assert [error.id for error in errors] == ["sqlsem.E001"]
        assert re.match(_with_aliases(message), errors[0].msg)


def test_every_setting_is_in_the_table():
    wrong = {key for param in SETTINGS if isinstance(param.values[0], dict) for key in param.values[0]}
    assert set(KEYS) <= wrong


@pytest.mark.parametrize(
    ("path", "message"),
    cases(
        ("no module", "no_such_package.Backend",
         "Could not import the semaphore backend 'no_such_package.Backend': No module named 'no_such_package'"),
        ("no attribute", "django_sqlsem.backends.rows.Nothing",
         "Could not import the semaphore backend 'django_sqlsem.backends.rows.Nothing': Module "
         '"django_sqlsem.backends.rows" does not define a "Nothing" attribute/class'),
        ("no dots", "rows",
         "Could not import the semaphore backend 'rows': rows doesn't look like a module path"),
        ("empty module", ".Backend", "Could not import the semaphore backend '.Backend': Empty module name"),
        ("relative", "..Backend", "Could not import the semaphore backend '..Backend': the 'package' argument is "
         "required to perform a relative import for '.'"),
        ("function", "os.path.join",
         "The semaphore backend 'os.path.join' must be a subclass of django_sqlsem.backends.base.BaseSemaphoreBackend, "
         "not <function join at .*>."),
        ("other class", "datetime.date",
         "The semaphore backend 'datetime.date' must be a subclass of "
         "django_sqlsem.backends.base.BaseSemaphoreBackend, not <class 'datetime.date'>."),
    ),
)  # fmt: skip
def test_backend_paths(path, message):
    pattern = exactly(message).replace(r"at\ \.\*", "at .*")
    for value in ({"BACKEND": path}, {"DATABASES": {"default": {"BACKEND": path}}}):
        with override_settings(SQLSEM=value):
            with pytest.raises(InvalidSemaphoreBackendError, match=pattern):
                mutex("reports").acquire()
            with pytest.raises(InvalidSemaphoreBackendError, match=pattern):
                queries.semaphores()
            assert [error.id for error in check_settings(None)] == ["sqlsem.E001"]


def test_an_alias_that_is_not_there():
    aliases = ", ".join(sorted(connections.settings))
    message = exactly(f"using is 'locks', which is not in DATABASES: {aliases}.")
    lock = mutex("reports", using="locks")  # which may be made before there are settings
    for call in (
        lock.acquire,
        lock.try_acquire,
        lock.status,
        lock(lambda: None),
        lambda: asyncio.run(lock.aacquire()),
        lambda: asyncio.run(lock.astatus()),
        lambda: queries.semaphores(using="locks"),
        lambda: control.pause("reports", by="ann", using="locks"),
        lambda: testing.held(lock).__enter__(),
    ):
        with pytest.raises(ImproperlyConfigured, match=message):
            call()


class Nowhere:
    """A router that writes the lock tables to a database that is not there."""

    def db_for_write(self, model, **hints):
        return "nowhere" if model._meta.app_label == "sqlsem" else None


def test_a_router_that_leads_nowhere():
    aliases = ", ".join(sorted(connections.settings))
    message = f"The router's database for writing locks is 'nowhere', which is not in DATABASES: {aliases}."
    with override_settings(DATABASE_ROUTERS=[Nowhere()]):
        with pytest.raises(ImproperlyConfigured, match=exactly(message)):
            mutex("reports").acquire()
        assert [error.msg for error in check_settings(None)] == [message]


def test_what_is_set_per_alias_wins():
    per_alias = {"LEASE": 5, "TIMEOUT": None, "IDLE": datetime.timedelta(minutes=2)}
    with override_settings(SQLSEM={"LEASE": 10, "TIMEOUT": 1.5, "DATABASES": {"default": per_alias}}):
        assert (config().lease, config().timeout, config().idle) == (10, 1.5, 60)
        assert (config("default").lease, config("default").timeout, config("default").idle) == (5, None, 120)


def test_a_bad_override_of_one_alias_is_told_whichever_is_used():
    message = exactly("SQLSEM['DATABASES']['default']['LEASE'] must be from 1 to 1e+09 seconds, not 0.")
    with override_settings(SQLSEM={"DATABASES": {"default": {"LEASE": 0}}}):
        for alias in connections.settings:
            with pytest.raises(ImproperlyConfigured, match=message):
                config(alias)


def test_the_backend_stays_the_same_when_other_settings_change():
    before = get_backend(database_for())
    with override_settings(SQLSEM={"TIMEOUT": 1}):
        assert get_backend(database_for()) is before
    assert get_backend(database_for()) is before


@pytest.mark.parametrize("name", [mark_safe("<b>"), Colour.RED, SafeString("x")])
def test_a_name_of_another_class_is_the_text_it_holds(name):
    made = semaphore(name)
    assert type(made.name) is str
    assert made.name == str.__str__(name)


def test_a_number_of_another_class_is_the_number_it_holds():
    size = enum.IntEnum("size", {"MEDIUM": 3})
    made = semaphore("reports", size.MEDIUM, take=size.MEDIUM)
    assert type(made.slots) is type(made.take) is int
    assert made.slots == made.take == 3


def test_what_is_allowed_is_kept():
    lock = semaphore(
        "x" * 200, 10_000, take=10_000, timeout=datetime.timedelta(minutes=1), lease=datetime.timedelta(hours=1),
        on_busy=HTTPStatus.TOO_MANY_REQUESTS, key=len, release="on_commit", fair=False, max_hold=1e9, on_lost=print,
        using="default",
    )  # fmt: skip
    assert (lock.slots, lock.take, lock.timeout, lock.lease, lock.max_hold) == (10_000, 10_000, 60.0, 3600.0, 1e9)
    assert (lock.on_busy, lock.release_policy, lock.fair) == (429, "on_commit", False)
    assert semaphore("x", timeout=None).timeout is None
    assert semaphore("x", timeout=-0.0).timeout == 0


# Anything at all.

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([ENORMOUS, -ENORMOUS, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
    st.booleans(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.timedeltas(),
)
ANYTHING = st.one_of(
    st.none(),
    NUMBERS,
    st.text(max_size=5),
    st.binary(max_size=5),
    st.datetimes(),
    st.uuids(),
    st.sampled_from([len, int, semaphore, Ellipsis, NotImplemented, object(), Unspeakable(), uuid, HTTPStatus.GONE]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.from_type(object).filter(lambda value: type(value).__module__ != "hypothesis"),
)
ARGUMENTS = ("slots", "take", "timeout", "lease", "on_busy", "key", "release", "fair", "max_hold", "on_lost", "using")
QUICK = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.data())
def test_any_argument_is_taken_or_refused_by_name(data):
    argument = data.draw(st.sampled_from(ARGUMENTS))
    value = data.draw(ANYTHING)
    try:
        made = semaphore("reports", **{argument: value})
    except (TypeError, ValueError) as error:
        assert str(error).startswith(f"{argument} must be ")
        assert len(str(error)) < 400
        return
    assert semaphore("reports", **{argument: value}) == made
    assert made.slots is None or (type(made.slots) is int and 1 <= made.slots <= 10_000)
    assert made.lease is None or 1 <= made.lease <= 1e9
    assert made.timeout is None or not made.timeout or 0 <= made.timeout <= 1e9


@QUICK
@given(ANYTHING)
def test_anything_for_a_name_is_taken_or_refused(value):
    try:
        made = semaphore(value)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(("A semaphore's name", "A part of a semaphore's name must "))
        return
    assert made.name == (joined(value) if isinstance(value, tuple) else value)


@settings(QUICK, max_examples=80)
@given(st.sampled_from(KEYS), ANYTHING, st.booleans())
def test_any_setting_is_taken_or_refused_by_key(key, value, per_alias):
    with override_settings(SQLSEM={"DATABASES": {"default": {key: value}}} if per_alias else {key: value}):
        try:
            found = config("default")
        except ImproperlyConfigured as error:
            assert repr(key) in str(error)
            assert len(str(error)) < 400
        else:
            assert 1 <= found.lease <= 1e9
            assert 400 <= found.busy_status <= 599


@settings(QUICK, max_examples=40)
@given(timeout=st.one_of(NUMBERS, st.none(), st.text(max_size=3)))
def test_any_timeout_of_acquire_is_taken_or_refused(committed_for_hypothesis, timeout):
    lock = mutex("any timeout")
    try:
        permit = lock.acquire(timeout=timeout)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("timeout must be ")
    else:
        permit.release()


@pytest.fixture(scope="module")
def committed_for_hypothesis(django_db_setup, django_db_blocker):
    """The databases for as many examples as there are; a function's fixture would be made for the first alone."""
    with django_db_blocker.unblock():
        yield
        from tests.support.databases import delete_rows

        delete_rows("default")
        connections.close_all()


def test_a_blocking_call_in_an_event_loop_is_told_what_to_use(db):
    async def main():
        semaphore("x").acquire()

    with pytest.raises(SynchronousOnlyOperation, match=r"use `async with` or `await semaphore\.aacquire\(\)`\.$"):
        asyncio.run(main())
