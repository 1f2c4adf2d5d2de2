from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, load_command_class

from django_sqlsem import control, queries
from django_sqlsem.core import durations, identity
from django_sqlsem.management import output
from django_sqlsem.models import SemaphoreRow
from tests.support.operators import (
    ON_ONE_DATABASE,
    hold,
    locks,
    locks_command,
    make_semaphore,
    process_exists,
    slot_row,
    wait,
)

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]


def printed(capsys: Any, *arguments: str) -> str:
    locks(*arguments)
    return str(capsys.readouterr().out)


class Terminal(io.StringIO):
    """A stdin that answers like a person."""

    def isatty(self) -> bool:
        return True


def test_list_shows_holders_and_waiters(database: str, capsys: Any) -> None:
    make_semaphore(database)
    printed(capsys, "list", "--database", database)  # loads what it needs, so that ages are told at once after this
    hold(database, slot=1)
    hold(database, slot=3, left=-20, age=80, host="web9", label="app.tasks.report[1]", user="")
    wait(database)
    lines = printed(capsys, "list", "--database", database).splitlines()
    assert lines[0].split() == ["NAME", "SLOT", "STATE", "HOLDER", "WORK", "USER", "AGE", "LEASE", "LEFT"]
    assert "reports  1/3   held        web1 pid 4711 MainThread  GET /reports/" in lines[1]
    assert lines[1].split("GET /reports/")[1].split()[:3] == ["ann", "10", "s"]
    assert "3/3   stale       web9 pid 4711 MainThread  app.tasks.report[1]  -" in lines[2]
    assert "ran out 20 s ago" in lines[2]
    assert "waiting x2  web2 pid 99 worker" in lines[3]
    assert lines[5] == "reports: 1 of 3 slots held, 1 stale, 2 waiting"


def test_list_stale(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    assert printed(capsys, "list", "--stale", "--database", database) == "Nothing is stale.\n"
    hold(database, slot=2, left=-20, host="web9")
    wait(database)
    out = printed(capsys, "list", "--stale", "--database", database)
    assert "web9" in out
    assert "web1" not in out
    assert "web2" not in out
    assert "reports: 1 of 3 slots held, 1 stale, 2 waiting" in out


def test_list_of_nothing(database: str, capsys: Any) -> None:
    friendly = "Nothing is held and nobody waits"
    assert printed(capsys, "list", "--database", database) == f"{friendly}: 0 names known.\n"
    make_semaphore(database)
    assert printed(capsys, "list", "--busy", "--database", database) == "Nothing is busy.\n"
    told = printed(capsys, "list", "--busy", "--name", "x*", "--database", database)
    assert told == "Nothing is busy among names like 'x*'.\n"
    assert printed(capsys, "list", "--database", database).endswith(f"\n\n{friendly}: 1 name known.\n")
    out = printed(capsys, "list", "--name", "x*", "--database", database)
    assert out == f"{friendly} among names like 'x*': 0 names known.\n"
    assert printed(capsys, "list", "--format", "json", "--name", "x*", "--database", database) == "[]\n"


def test_list_counts_the_names_of_templates_too(database: str, capsys: Any) -> None:
    for name in ("reports", "other"):
        make_semaphore(database, name)
    for name in ("sync:1", "sync:2"):
        make_semaphore(database, name, template="sync:{pk}")
    out = printed(capsys, "list", "--database", database)
    assert out.endswith("\n\nNothing is held and nobody waits: 2 names and 1 template of 2 names known.\n")
    hold(database, "sync:1")
    assert "Nothing is held" not in printed(capsys, "list", "--database", database)


def test_list_lists_idle_names_too(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database)
    make_semaphore(database, "idle", slots=4)
    make_semaphore(database, "still", slots=5)
    assert control.pause("still", by="ann@web1", reason="INC-12", duration=1800, using=database)
    lines = printed(capsys, "list", "--database", database).splitlines()
    assert lines[1].startswith("reports  1/3   held ")
    assert lines[2].split() == ["idle", "0/4", "idle", "-", "never", "granted", "-", "-", "-"]
    assert lines[3].split()[:3] == ["still", "0/5", "paused"]
    assert lines[5] == "reports: 1 of 3 slots held, 0 waiting"
    assert re.fullmatch(
        r"still: 0 of 5 slots held, 0 waiting, paused by ann@web1 since [\d-]+ [\d:]+ UTC until [\d-]+ [\d:]+ UTC"
        r" \(in (30 min 00 s|29 min 5\d s)\) \(INC-12\)",
        lines[6],
    )
    busy = printed(capsys, "list", "--busy", "--database", database)
    assert "reports" in busy
    assert "still" in busy
    assert "idle" not in busy
    assert "idle" not in printed(capsys, "list", "--stale", "--database", database)


def test_who_paused_is_in_json_and_show(database: str, capsys: Any) -> None:
    make_semaphore(database)
    out = printed(capsys, "set", "reports", "--pause", "--for", "30m", "--reason", "INC-12", "--database", database)
    assert "paused by " in out
    assert "(INC-12)" in out
    assert "Nothing more is granted for 30 min 00 s, or until `--resume`" in out
    assert ") (INC-12)\n" in printed(capsys, "show", "reports", "--database", database)
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert found["paused_by"].endswith(f"@{socket.gethostname()}")
    assert (found["paused"], found["paused_reason"]) == (True, "INC-12")
    assert found["paused_at"].endswith("+00:00")
    assert found["paused_until"] > found["paused_at"]
    assert 1700 < found["resumes_in"] <= 1800
    printed(capsys, "drain", "reports", "--for", "1h", "--reason", "deploy", "--database", database)
    assert "(deploy)" in printed(capsys, "show", "reports", "--database", database)


def test_slots_for_a_time(database: str, capsys: Any) -> None:
    make_semaphore(database)
    sets = ("set", "reports", "--slots", "5", "--for", "30m", "--reason", "month end", "--database", database)
    out = printed(capsys, *sets)
    told = (
        r"reports: 0 of 5 slots held, 0 waiting, set by \S+ \(the code says 3\) until [\d-]+ [\d:]+ UTC"
        r" \(in (30 min 00 s|29 min 5\d s)\) \(month end\)\n"
    )
    assert re.search(told, out)
    assert "In 30 min 00 s the code's number counts again, by itself." in out
    for verb in ("show", "list"):
        arguments = ("reports",) if verb == "show" else ()
        assert re.search(told, printed(capsys, verb, *arguments, "--database", database)), verb
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert found["slots_by"].endswith(f"@{socket.gethostname()}")
    assert (found["slots"], found["operator_slots"], found["slots_reason"]) == (5, 5, "month end")
    assert found["slots_until"].endswith("+00:00")
    assert 1700 < found["slots_end_in"] <= 1800
    assert "by itself" not in printed(capsys, *sets[:4], "--database", database)
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert (found["operator_slots"], found["slots_until"], found["slots_end_in"]) == (5, None, None)
    printed(capsys, "set", "reports", "--slots", "default", "--database", database)
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert (found["slots"], found["operator_slots"], found["slots_by"]) == (3, None, "")


def test_locks_alone_lists(database: str, committed: None, capsys: Any) -> None:
    make_semaphore("default", "alone")
    assert "alone" in printed(capsys)
    for arguments in ((), ("--busy",), ("--name", "al*", "--traceback")):
        done = subprocess.run(**locks_command(*arguments), capture_output=True, text=True, check=True, timeout=60)
        assert ("Nothing is busy" if "--busy" in arguments else "Nothing is held and nobody waits") in done.stdout
    done = subprocess.run(**locks_command("--help"), capture_output=True, text=True, check=True, timeout=60)
    assert "exit codes:" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("list", "--settings", "tests.settings", "--traceback", "-v", "0", "--no-color"),
        ("show", "reports", "--settings=tests.settings", "--pythonpath", ".", "--force-color"),
        ("--settings", "tests.settings", "-v", "2", "list"),
    ],
)
def test_djangos_options_may_stand_behind_the_verb(committed: None, options: tuple[str, ...]) -> None:
    make_semaphore("default")
    command = locks_command(*options)
    command["env"].pop("DJANGO_SETTINGS_MODULE")
    done = subprocess.run(**command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reports" in done.stdout


def test_options_before_the_verb_are_not_undone_by_it() -> None:
    parser = load_command_class("django_sqlsem", "locks").create_parser("manage.py", "locks")
    assert parser.parse_args(["-v", "3", "--traceback", "list"]).verbosity == 3
    assert parser.parse_args(["-v", "3", "--traceback", "list"]).traceback
    assert parser.parse_args(["list", "-v", "3", "--traceback"]).verbosity == 3
    assert parser.parse_args(["list"]).verbosity == 1
    assert parser.parse_args(["run", "a", "--traceback", "--", "x", "--settings", "y"]).command == [
        "x", "--settings", "y",
    ]  # fmt: skip


def test_a_closed_pipe_ends_the_command_quietly(committed: None) -> None:
    for nth in range(3000):  # more than a pipe holds
        SemaphoreRow.objects.create(key=f"{nth:032}", name=f"{nth:04} {'n' * 60}", declared_slots=1)
    for arguments in (("list",), ("list", "--watch", "0.1")):
        with running(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(30) == 141
            assert process.stderr.read() == ""


def test_idle_names_are_dim_in_a_terminal(committed: None) -> None:
    make_semaphore("default")
    command = locks_command("list", "--force-color")
    master, slave = pty.openpty()
    subprocess.run(**command, stdout=slave, check=True, timeout=60)
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):
        while part := os.read(master, 4096):
            said += part
    os.close(master)
    assert re.search(rb"\x1b\[2mreports .*idle.*\x1b\[0m", said)


def test_list_as_json_and_csv(database: str, capsys: Any) -> None:
    make_semaphore(database, "a,b\n")
    hold(database, "a,b\n")
    wait(database, "a,b\n")
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert (found["name"], found["slots"], found["held"], found["waiting"]) == ("a,b\n", 3, 1, 2)
    (holder,) = found["holders"]
    assert (holder["slot"], holder["state"], holder["host"], holder["token"]) == (1, "held", "web1", 7)
    assert holder["acquired_at"].endswith("+00:00")
    first, second = csv.DictReader(io.StringIO(printed(capsys, "list", "--format", "csv", "--database", database)))
    assert (first["name"], first["slot"], first["slots"], first["state"]) == ("a,b\n", "1", "3", "held")
    assert float(first["lease_left_seconds"]) == pytest.approx(50, abs=2)
    assert (second["state"], second["waiting"], second["pid"]) == ("waiting", "2", "99")


def test_text_cannot_move_the_cursor(database: str, capsys: Any) -> None:
    make_semaphore(database, "evil\x1b[2J\n", paused=True)
    hold(database, "evil\x1b[2J\n", label="GET /\x1b]0;x\x07")
    for arguments in (["list"], ["show", "evil\x1b[2J\n"], ["purge", "--idle", "--dry-run"]):
        out = printed(capsys, *arguments, "--database", database)
        assert all(char.isprintable() or char == "\n" for char in out)
    assert r"evil\x1b[2J\n" in printed(capsys, "list", "--database", database)


def test_table_fits_the_terminal(monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = ("n" * 30, "1/3", "held", "some-host.example pid 1 MainThread", "w" * 90, "ann", "10 s", "50 s")
    wide = ("名前", "1/3", "held", "h", "w", "u", "1 s", "1 s")
    _header, first, second = output.table([row, wide], output.headers(()), fit=True)
    assert len(first) <= 80
    assert first.count("…") >= 1
    assert second.startswith("名前" + " " * 8)
    assert len(output.table([row], output.headers(()), fit=False)[1]) > 120


def test_show(database: str, capsys: Any) -> None:
    make_semaphore(database, operator_slots=5)
    out = printed(capsys, "show", "reports", "--database", database)
    assert "0 of 5 slots held, 0 waiting, set by an operator (the code says 3)\n" in out
    assert "Nobody holds it and nobody waits." in out
    hold(database)
    wait(database)
    out = printed(capsys, "show", "reports", "--database", database)
    assert "reports slot 1 (held): web1 pid 4711 MainThread, GET /reports/, user ann, taken 10 s ago" in out
    assert "token 7" in out
    assert "waiting: web2 pid 99 worker, GET /wait/, 2 threads or tasks" in out
    assert json.loads(printed(capsys, "show", "reports", "--format", "json", "--database", database))["held"] == 1
    with pytest.raises(
        CommandError,
        match=r"There is no semaphore 'report'\. Is it 'reports'\? A name is known from its first acquire\.$",
    ):
        locks("show", "report", "--database", database)


def test_purge_says_what_it_will_do_and_asks(database: str, capsys: Any, monkeypatch: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1, left=-20, age=80)
    hold(database, slot=2, left=20)
    out = printed(capsys, "purge", "--dry-run", "--database", database)
    assert "To be freed, as the lease has run out (1 slot):\n  reports slot 1 (stale): web1 pid 4711" in out
    assert "Left alone" in out
    assert "to be purged in 20 s" in out or "to be purged in 19 s" in out
    assert out.endswith("Dry run: nothing was changed.\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(CommandError, match="no terminal to ask: give --noinput"):
        locks("purge", "--database", database)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    capsys.readouterr()
    assert printed(capsys, "purge", "--database", database).endswith("Continue? [y/N] Nothing was changed.\n")
    assert slot_row(database).expires_us is not None
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert printed(capsys, "purge", "--database", database).endswith("Freed 1 slot, deleted 0 names.\n")
    assert slot_row(database).expires_us is None
    assert slot_row(database, slot=2).expires_us is not None
    assert printed(capsys, "purge", "--database", database).endswith("Nothing to purge.\n")


def test_purge_idle_and_older_than(database: str, capsys: Any) -> None:
    for name in ("calm", "other"):
        make_semaphore(database, name)
        hold(database, name, left=-7300, age=7360)
    out = printed(capsys, "purge", "--idle", "--older-than", "3h", "--noinput", "--database", database)
    assert out == "Nothing to purge.\n"
    arguments = ("purge", "--idle", "--older-than", "2h", "--name", "c*", "--noinput", "--database", database)
    out = printed(capsys, *arguments)
    assert "To be deleted, as nobody uses it (1 name):\n  calm: last granted 2 h 02 min ago" in out
    assert "Freed 1 slot, deleted 1 name." in out
    assert list(SemaphoreRow.objects.using(database).values_list("name", flat=True)) == ["other"]


def test_purge_tells_what_has_changed(database: str, capsys: Any, monkeypatch: Any) -> None:
    make_semaphore(database)
    hold(database, left=-20)

    def come_back() -> str:
        hold(database, left=60)
        return "y\n"

    stdin = Terminal()
    monkeypatch.setattr(stdin, "readline", come_back)
    monkeypatch.setattr(sys, "stdin", stdin)
    out = printed(capsys, "purge", "--database", database)
    assert "Freed 0 slots" in out
    assert "Not touched, it has changed: reports slot 1" in out


def test_revoke(database: str, capsys: Any, monkeypatch: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=2)
    monkeypatch.setattr(sys, "stdin", Terminal("no\n"))
    assert "Nothing was changed." in printed(capsys, "revoke", "reports", "--slot", "1", "--database", database)
    out = printed(capsys, "revoke", "reports", "--slot", "1", "--noinput", "--database", database)
    assert "To be revoked (1 slot):\n  reports slot 1 (held): web1 pid 4711" in out
    assert out.endswith("Revoked 1 slot.\n")
    assert slot_row(database, slot=1).revoked_token == 7
    assert "@" in slot_row(database, slot=1).revoked_by
    assert slot_row(database, slot=2).expires_us is not None
    out = printed(capsys, "revoke", "reports", "--slot", "1", "--noinput", "--database", database)
    assert out == "Nobody holds slot 1 of 'reports': nothing to revoke.\n"
    assert "Revoked 1 slot." in printed(capsys, "revoke", "reports", "--noinput", "--database", database)
    with pytest.raises(CommandError, match="There is no semaphore 'unknown'"):
        locks("revoke", "unknown", "--noinput", "--database", database)


def test_revoke_disturbs_nobody_who_came_since(database: str, monkeypatch: Any) -> None:
    make_semaphore(database)
    hold(database)

    def change() -> str:
        hold(database, token=8, host="web9")
        return "yes\n"

    stdin = Terminal()
    monkeypatch.setattr(stdin, "readline", change)
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(CommandError, match="The holder of slot 1 has changed since"):
        locks("revoke", "reports", "--database", database)
    assert slot_row(database).permit_id


def test_set(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=2)
    out = printed(capsys, "set", "reports", "--slots", "1", "--database", database)
    assert "reports: 2 of 1 slot held" in out
    assert "nothing is granted until fewer are held" in out
    assert "the code says 3" in out
    out = printed(capsys, "set", "reports", "--slots", "default", "--database", database)
    assert "2 of 3 slots held, 0 waiting\n" in out
    assert re.search(r"\nBefore: 1 slot, set by \S+ \(the code says 3\)\.\n", out)
    assert "Before" not in printed(capsys, "set", "reports", "--slots", "3", "--database", database)
    printed(capsys, "set", "reports", "--slots", "default", "--database", database)
    assert re.search(
        r", paused by \S+ since [\d-]+ [\d:]+ UTC\n",
        printed(capsys, "set", "reports", "--pause", "--database", database),
    )
    assert "paused" not in printed(capsys, "set", "reports", "--resume", "--database", database)
    make_semaphore(database, "one", slots=1, kind="mutex")
    with pytest.raises(CommandError, match="'one' is a mutex"):
        locks("set", "one", "--slots", "2", "--database", database)
    with pytest.raises(CommandError, match="There is no semaphore 'unknown'"):
        locks("set", "unknown", "--slots", "2", "--database", database)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "a", "--slots", "default", "--for", "1h"), "--for is of a pause or a number of slots"),
        (("set", "a", "--resume", "--for", "1h"), "--for is of a pause or a number of slots"),
        (("set", "a", "--pause", "--for", "long"), "'long' is no length of time"),
        (("list", "--stale", "--busy"), "not allowed with argument"),
        (("odd",), "odd"),
        (("show", "x" * 201), "1 to 200 characters"),
        (("show", ""), "1 to 200 characters"),
        (("set", "a", "--slot", "3"), "one of the arguments --slots --pause --resume is required"),
        (("set", "a", "--slots", "0"), "slots must be from 1 to 10000, not 0"),
        (("set", "a", "--slots", "many"), "slots must be an int"),
        (("set", "a"), "one of the arguments --slots --pause --resume is required"),
        (("set", "a", "--pause", "--resume"), "not allowed with argument"),
        (("purge", "--older-than", "soon"), "'soon' is no length of time: write seconds, or 90s, 15m, 2h, 7d."),
        (("list", "--database", "nowhere"), "'nowhere' is not in DATABASES: default"),
        (("list", "--watch", "0"), "at most ten times a second"),
        (("list", "--", "ls"), "locks list takes no command: ls"),
        (("run", "a"), "Which command"),
        (("run", "a", "--timeout", "-1", "--", "true"), "argument"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message.replace("(", r"\(")):
        locks(*arguments)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800), ("1h30m", 5400)],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert durations.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-1", "1 h", "1w", "h1", "1e3", "nan", "inf", "٣s", "9" * 400 + "d", "1d" * 5 + "x"]
)
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="length of time"):
        durations.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.6, "1 h 00 min"),
        (7260, "2 h 01 min"), (86400 * 3 + 7200, "3 d 02 h"), (-5, "-5.0 s"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert durations.duration(seconds) == text


# With child processes.


def run_locks(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        **locks_command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


@contextlib.contextmanager
def running(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "stdin": subprocess.DEVNULL,
        "text": True,
    } | options
    process = subprocess.Popen(**locks_command(*arguments) | options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def eventually(check: Any, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


def held(database: str, name: str) -> int:
    found = queries.semaphore(name, using=database)
    return found.held if found else 0


@pytest.mark.process_side("postgres")
def test_run_passes_the_exit_code_through(database: str) -> None:
    done = run_locks("run", "nightly", "--slots", "2", "--database", database, "--", "sh", "-c", "echo hi; exit 3")
    assert (done.stdout, done.returncode) == ("hi\n", 3)
    assert held(database, "nightly") == 0


@ON_ONE_DATABASE
def test_run_passes_good_and_bad_ends_through(database: str) -> None:
    assert run_locks("run", "nightly", "--database", database, "--", "true").returncode == 0
    assert run_locks("run", "nightly", "--database", database, "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert held(database, "nightly") == 0


def test_run_without_the_dashes_shows_where_the_command_belongs(committed: None) -> None:
    ended = run_locks("run", "nightly", "./backup.sh")
    assert ended.returncode == 2
    assert " run NAME " in ended.stderr
    assert "-- COMMAND..." in ended.stderr
    assert "unrecognized arguments: ./backup.sh" in ended.stderr


def test_run_takes_any_command_line(committed: None) -> None:
    done = run_locks("run", "nightly", "--", "printf", "%s|", "--slots", "--", "-h", "a b")
    assert (done.stdout, done.returncode) == ("--slots|--|-h|a b|", 0)


def test_run_cannot_start_the_command(committed: None, tmp_path: Path) -> None:
    done = run_locks("run", "nightly", "--", "no-such-command-here")
    assert done.returncode == 127
    assert "no-such-command-here" in done.stderr
    plain = tmp_path / "plain"
    plain.write_text("echo hi")
    assert run_locks("run", "nightly", "--", str(plain)).returncode == 126
    assert run_locks("run", "nightly").returncode == 2
    assert held("default", "nightly") == 0


def test_run_is_busy(database: str) -> None:
    make_semaphore(database, "nightly", slots=1)
    hold(database, "nightly")
    started = time.monotonic()
    done = run_locks("run", "nightly", "--timeout", "0", "--database", database, "--", "true")
    assert done.returncode == 75
    assert "web1" in done.stderr
    assert "GET /reports/" in done.stderr
    assert time.monotonic() - started < 20
    assert slot_row(database, "nightly").token == 7


@ON_ONE_DATABASE
def test_run_under_a_mutex(database: str) -> None:
    make_semaphore(database, "only", slots=1, kind="mutex")
    arguments = ("run", "only", "--database", database, "--", "true")
    assert run_locks(*arguments).returncode == 0
    make_semaphore(database, "inside", slots=1, kind="rlock")
    assert run_locks("run", "inside", "--database", database, "--", "true").returncode == 0
    make_semaphore(database, "other", slots=1, kind="another kind")
    done = run_locks("run", "other", "--database", database, "--", "true")
    assert done.returncode == 1
    assert "another kind" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_shows_its_command_as_the_work(database: str) -> None:
    with running("run", "nightly", "--database", database, "--", "/bin/sleep", "30", "99") as process:
        snapshot = eventually(lambda: queries.holders("nightly", using=database))[0]
        assert snapshot.label == "sleep 30"
        assert snapshot.pid == process.pid
        assert snapshot.user
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    assert held(database, "nightly") == 0


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["sh", "-c", "PASSWORD=hunter2 ./backup.sh"], "sh"),
        (["/usr/bin/python", "-c", "login('hunter2')"], "python"),
        (["manage.py", "import", "--api-key=hunter2"], "manage.py import"),
        (["curl", "https://ann:hunter2@example.org/"], "curl"),
        (["psql", "postgres://ann:hunter2@db/x"], "psql"),
        (["./backup.sh", "full", "hunter2"], "backup.sh full"),
        (["./backup.sh"], "backup.sh"),
    ],
)
def test_no_secret_gets_into_a_label(command: list[str], label: str) -> None:
    assert identity.command_label(command) == label


@pytest.mark.parametrize(
    ("argv", "label"),
    [
        (["python", "-c", "login('hunter2')"], "-c"),
        (["python", "-m", "celery", "--password", "hunter2"], "-m celery"),
        (["python", "/srv/manage.py", "sync", "hunter2", "--key=hunter2"], "manage.py sync"),
        (["python"], ""),
        (["python", "-u", "worker.py", "sync"], "worker.py sync"),
        (["python", "-uB", "-W", "ignore", "-Xdev", "-X", "utf8", "worker.py"], "worker.py"),
        (["python", "-uWerror", "--check-hash-based-pycs=never", "worker.py"], "worker.py"),
        (["python", "-um", "celery", "worker"], "-m celery"),
        (["python", "-B", "-mcelery", "worker"], "-m celery"),
        (["python", "-Bc", "login('hunter2')"], "-c"),
        (["python", "-"], ""),
    ],
)
def test_no_secret_gets_into_the_label_of_a_program(monkeypatch: Any, argv: list[str], label: str) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    assert identity._command_line.__wrapped__() == label


def test_run_shows_the_label_that_it_is_given(database: str) -> None:
    command = ("run", "nightly", "--label", "the backup", "--database", database, "--", "sleep", "30")
    with running(*command) as process:
        assert eventually(lambda: queries.holders("nightly", using=database))[0].label == "the backup"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_run_forwards_signals(committed: None, number: int) -> None:
    script = f"trap 'echo caught; exit 9' {int(number)}; echo ready; while :; do sleep 0.1; done"
    with running("run", "nightly", "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(20) == 9
        assert process.stdout.readline() == "caught\n"
    assert held("default", "nightly") == 0


def test_run_under_nohup_goes_on_after_a_hangup(committed: None) -> None:
    """A signal that whoever started it chose to ignore is neither taken nor passed on."""
    arguments = locks_command("run", "nightly", "--", "sh", "-c", "echo ready; read line; exit 3")["args"]
    ignoring = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *arguments]
    with running("run", args=ignoring, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)  # longer than it takes to look at the permit
        process.communicate("\n", timeout=20)
        assert process.returncode == 3
    assert held("default", "nightly") == 0


def stops_while_it_waits(database: str, number: int) -> None:
    make_semaphore(database, "nightly", slots=1)
    hold(database, "nightly")
    with running(
        "run", "nightly", "--timeout", "none", "--database", database, "--", "touch", "/nonexistent"
    ) as process:
        eventually(lambda: queries.semaphores(state="waiting", using=database))
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    eventually(lambda: not queries.semaphores(state="waiting", using=database), 5)


def test_run_can_be_stopped_while_it_waits(database: str) -> None:
    stops_while_it_waits(database, signal.SIGTERM)


@ON_ONE_DATABASE
def test_run_can_be_interrupted_while_it_waits(database: str) -> None:
    stops_while_it_waits(database, signal.SIGINT)


def test_run_waits_its_turn(database: str) -> None:
    make_semaphore(database, "nightly", slots=1)
    hold(database, "nightly")
    with running("run", "nightly", "--timeout", "30s", "--database", database, "--", "echo", "done") as process:
        eventually(lambda: queries.semaphores(state="waiting", using=database))
        control.revoke("nightly", by="ann", using=database)
        assert process.communicate(timeout=20)[0] == "done\n"
        assert process.returncode == 0


@pytest.fixture
def short_lease(settings: Any) -> None:
    settings.SQLSEM = {"LEASE": 2.0}


def test_run_stops_the_command_when_the_permit_is_lost(short_lease: None, database: str, tmp_path: Path) -> None:
    """Also what the command has started; and no exit code of 0 hides that the lock was lost.

    The command ends by itself, long before it would be killed: that would be told by another code.
    """
    pids = tmp_path / "pids"
    script = f"trap 'exit 0' TERM; sleep 300 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    with running("run", "nightly", "--database", database, "--", "sh", "-c", script) as process:
        eventually(pids.exists)
        assert control.revoke("nightly", by="ann", using=database)
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert "is lost: revoked by ann" in process.stderr.read()
    assert not any(process_exists(int(pid)) for pid in pids.read_text().split())


def test_run_kills_a_command_that_will_not_stop(short_lease: None, committed: None, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"trap '' TERM; echo $$ > {pids}.new; mv {pids}.new {pids}; while :; do sleep 0.2; done"
    with running("run", "nightly", "--", "sh", "-c", script) as process:
        eventually(pids.exists)
        control.revoke("nightly", by="ann", using="default")
        assert process.wait(30) == 128 + signal.SIGKILL
    assert not process_exists(int(pids.read_text()))


@pytest.mark.leaves_held
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent-death signal is Linux's")
def test_a_killed_run_takes_its_command_with_it(short_lease: None, committed: None, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with running(
        "run", "nightly", "--", "sh", "-c", f"echo $$ > {pids}.new; mv {pids}.new {pids}; exec sleep 300"
    ) as process:
        eventually(pids.exists)
        process.kill()
        process.wait(20)
    eventually(lambda: not process_exists(int(pids.read_text())))


def in_a_terminal(arguments: tuple[str, ...], type_in: bytes, wait_for: bytes) -> tuple[int, bytes]:
    """Run ``locks`` in a terminal of its own, type something once it has said something; return code and output."""
    command = locks_command(*arguments)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(command["cwd"])
        os.execve(sys.executable, command["args"], command["env"])  # noqa: S606
    said = b""
    typed = False
    watchdog = threading.Timer(40, os.kill, (pid, signal.SIGKILL))
    watchdog.start()
    try:
        while True:
            try:
                chunk = os.read(terminal, 4096)
            except OSError:
                break
            if not chunk:
                break
            said += chunk
            if not typed and wait_for in said:
                typed = True
                os.write(terminal, type_in)
    finally:
        _, status = os.waitpid(pid, 0)
        watchdog.cancel()
        os.close(terminal)
    return os.waitstatus_to_exitcode(status), said


def test_ctrl_c_in_a_terminal_reaches_the_command_once(committed: None) -> None:
    script = (
        "n=0; trap 'n=$((n+1)); echo got $n' INT; echo ready;"
        " i=0; while [ $i -lt 8 ]; do sleep 0.2; i=$((i+1)); done; exit 5"
    )
    code, said = in_a_terminal(("run", "nightly", "--", "sh", "-c", script), b"\x03", b"ready")
    assert code == 5
    assert b"got 1" in said
    assert b"got 2" not in said


def test_ctrl_c_ends_a_command_that_does_not_mind(committed: None) -> None:
    code, _said = in_a_terminal(("run", "nightly", "--", "sh", "-c", "echo ready; exec sleep 30"), b"\x03", b"ready")
    assert code == 130
    assert held("default", "nightly") == 0


def test_watch_in_a_terminal_ends_with_ctrl_c(committed: None) -> None:
    make_semaphore("default")
    hold("default")
    code, said = in_a_terminal(("list", "--watch", "0.2"), b"\x03", b"1 of 3 slots held")
    assert code == 0
    assert b"Traceback" not in said
    assert b"\x1b[2J" in said


def test_a_question_in_a_terminal(committed: None) -> None:
    make_semaphore("default")
    hold("default")
    code, said = in_a_terminal(("revoke", "reports"), b"y\n", b"Continue? [y/N]")
    assert code == 0
    assert b"Revoked 1 slot." in said
    assert slot_row("default").revoked_token == 7


def test_watch_as_json_is_one_document_per_line(committed: None) -> None:
    with running("list", "--watch", "0.2", "--format", "json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == []
        assert json.loads(process.stdout.readline()) == []
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_without_tables_the_error_helps(committed: None, tmp_path: Path) -> None:
    command = locks_command("list")
    databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}}
    command["env"]["SQLSEM_TEST_DATABASES"] = json.dumps(databases)
    done = subprocess.run(**command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    advice = "Run manage.py migrate --database default: the lock tables are not there. The database"
    assert advice in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr


def test_a_stream_that_cannot_show_a_name(committed: None) -> None:
    make_semaphore("default", "ночь", paused=True)
    command = locks_command("list")
    command["env"] |= {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(**command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert r"\u043d" in done.stdout


def test_wrong_settings_are_said_in_a_line(committed: None, settings: Any) -> None:
    settings.SQLSEM = {"LEASE": "long"}
    with pytest.raises(CommandError, match="LEASE"):
        call_command("locks", "list")
