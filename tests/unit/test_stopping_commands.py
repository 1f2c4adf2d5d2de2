"""``locks stop``, ``locks drain``, and what ``locks run`` does when it is asked to stop."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from typing import Any

import pytest
from django.core.management import CommandError

from django_sqlsem import control, queries
from tests.programs.lock_clients import Actor
from tests.support.operators import hold, locks, locks_command, make_semaphore, slot_row
from tests.unit.test_locks_command import eventually, held, printed, running

pytestmark = pytest.mark.process_side

SOON = 20.0


@pytest.mark.leaves_held
def test_stop_says_whom_it_asked_and_the_list_shows_it(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database, slot=1)
    hold(database, slot=3, token=9)
    out = printed(capsys, "stop", "reports", "--slot", "3", "--database", database)
    assert "Asked to stop (1 holder):\n  reports slot 3 (held): web1 pid 4711" in out
    assert "asked to stop by " in out
    assert (slot_row(database, slot=3).stop_token, slot_row(database, slot=1).stop_token) == (9, None)
    by = slot_row(database, slot=3).stop_by
    assert "@" in by
    assert slot_row(database, slot=3).expires_us is not None

    table = printed(capsys, "list", "--database", database).splitlines()
    assert "1/3   held " in table[1]
    assert "3/3   held, asked to stop  web1" in table[2]
    assert "reports: 2 of 3 slots held, 0 waiting, 1 asked to stop" in table
    (found,) = json.loads(printed(capsys, "list", "--format", "json", "--database", database))
    assert [holder["stop_by"] for holder in found["holders"]] == ["", by]
    rows = csv.DictReader(io.StringIO(printed(capsys, "list", "--format", "csv", "--database", database)))
    assert [row["stop_by"] for row in rows] == ["", by]
    assert f"asked to stop by {by}" in printed(capsys, "show", "reports", "--database", database)

    assert "(2 holders)" in printed(capsys, "stop", "reports", "--database", database)


@pytest.mark.leaves_held
def test_stop_means_the_holder_with_that_token(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database, slot=2, token=8)
    with pytest.raises(CommandError, match="7 is not the token of slot 2 of 'reports' any more") as refused:
        locks("stop", "reports", "--slot", "2", "--token", "7", "--database", database)
    assert refused.value.returncode == 1
    assert slot_row(database, slot=2).stop_token is None
    assert "(1 holder)" in printed(capsys, "stop", "reports", "--slot", "2", "--token", "8", "--database", database)
    assert "Nobody holds slot 1 of" in printed(capsys, "stop", "reports", "--slot", "1", "--database", database)
    with pytest.raises(CommandError, match="give --slot too"):
        locks("stop", "reports", "--token", "7", "--database", database)
    with pytest.raises(CommandError, match="There is no semaphore 'unknown'"):
        locks("stop", "unknown", "--database", database)


def test_a_lease_that_has_run_out_is_nobodys(database: str, capsys: Any) -> None:
    make_semaphore(database)
    hold(database, left=-20, age=80)
    assert "Nobody holds 'reports'" in printed(capsys, "stop", "reports", "--database", database)
    assert "It is drained: nobody holds it." in printed(
        capsys, "drain", "reports", "--wait", "0", "--database", database
    )


def test_drain_waits_until_everybody_has_left(database: str, capsys: Any) -> None:
    with Actor(database, "emptied", slots=2, lease=3600, heeds=True) as one, Actor(database, "emptied", slots=2) as two:
        one.ready().acquire()
        two.ready()
        out = printed(capsys, "drain", "emptied", "--database", database)
        assert "emptied is paused, and its holders are asked to stop.\n  emptied slot 1 (held)" in out
        assert "1 holder has not left yet.\nNothing more is granted until `locks set emptied --resume`." in out
        one.expect("on_stop", timeout=SOON)
        with pytest.raises(CommandError, match=r"1 holder has not left within 0\.5 s\. It stays paused\.") as refused:
            locks("drain", "emptied", "--wait", "0.5", "--database", database)
        assert refused.value.returncode == 75
        capsys.readouterr()

        command = locks_command("drain", "emptied", "--wait", "none", "--database", database)
        with subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None
            assert "is paused" in waiting.stdout.readline()
            assert waiting.poll() is None
            one.release()
            out, err = waiting.communicate(timeout=60)
        assert (waiting.returncode, err) == (0, "")
        assert out.startswith("It is drained: nobody holds it.\n")
        assert two.try_acquire() is None
        locks("set", "emptied", "--resume", "--database", database)
        assert two.try_acquire() is not None
        two.release()
        one.end()
        two.end()


@pytest.mark.parametrize(
    ("arguments", "script", "said", "code"),
    [
        ((), "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.1; done", "caught", 9),
        (
            ("--stop-signal", "usr1"),
            "trap 'echo heard; exit 8' USR1; echo ready; while :; do sleep 0.1; done",
            "heard",
            8,
        ),
        (("--stop-signal", "none"), "echo ready; read line; echo went on", "went on", 0),
    ],
)
def test_run_passes_the_wish_on_as_a_signal(
    database: str, arguments: tuple[str, ...], script: str, said: str, code: int
) -> None:
    command = ("run", "nightly", *arguments, "--database", database, "--", "sh", "-c", script)
    with running(*command, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        eventually(lambda: control.request_stop("nightly", by="ann", using=database))
        if arguments[1:] == ("none",):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
        out, err = process.communicate("\n", timeout=SOON)
        assert (out, process.returncode) == (f"{said}\n", code)
        gets = {"none": "nothing", "usr1": "SIGUSR1"}.get(arguments[-1] if arguments else "", "SIGTERM")
        assert f"ann asks the holder of 'nightly' to stop: the command gets {gets}." in err
    assert held(database, "nightly") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "a", "--stop-signal", "odd", "--", "true"), "'odd' is no signal"),
        (("drain", "a", "--wait", "soon"), "'soon' is no length of time"),
        (("stop", "a", "--token", "x"), "invalid int value"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        locks(*arguments)


def test_acts_are_logged_and_signalled(database: str, caplog: Any) -> None:
    from django_sqlsem.signals import operator_acted

    acts = []

    def receiver(*, action: str, name: str, by: str, **_: Any) -> None:
        acts.append((action, name, by))

    operator_acted.connect(receiver)
    caplog.set_level("INFO", logger="django_sqlsem")
    try:
        with Actor(database, "logged") as holder:
            holder.ready().acquire()
            control.drain("logged", by="ann", using=database)
            holder.release()
            holder.end()
    finally:
        operator_acted.disconnect(receiver)
    assert acts == [("drain", "logged", "ann"), ("stop", "logged", "ann")]
    assert "drain of 'logged' by ann" in caplog.text
    assert "stop of 'logged' by ann: slot 1: " in caplog.text
    assert queries.semaphore("logged", using=database).held == 0
