"""Programs without this library, and without Python, take the very same locks: the scripts of docs/clients do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from django_sqlsem import control, mutex, semaphore
from django_sqlsem.models import SlotRow
from tests.support.databases import ROOT
from tests.support.processes import Child
from tests.support.threads import run_beside, wait_until

SCRIPT = ROOT / "docs" / "clients" / "locked.sh"
#: By vendor: how the scripts call the database, and the program that it takes.
CLIENTS = {"postgresql": ("postgresql", "psql"), "mysql": ("mariadb", "mariadb")}
#: A script starts some programs, which a busy machine may take its time for, in seconds.
PATIENT = 60.0

STAY = 'echo in; while [ ! -e "$0" ]; do sleep 0.05; done'
COUNT = {
    "enter": "entered = entered + 1, peak = CASE WHEN inside + 1 > peak THEN inside + 1 ELSE peak END,"
    " inside = inside + 1",
    "leave": "inside = inside - 1",
}


class Client:
    """The scripts on one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        settings = connections[alias].settings_dict
        self.database, self.program = CLIENTS[connections[alias].vendor]
        where = {key: str(settings[key]) for key in ("HOST", "PORT", "USER", "PASSWORD", "NAME")}
        if self.database == "postgresql":
            where["DATABASE"] = where.pop("NAME")
            self.environment = {f"PG{key}": value for key, value in where.items() if value}
        else:
            names = {"HOST": "host", "PORT": "port", "USER": "user", "NAME": "database"}
            options = " ".join(f"--{names[key]}={where[key]}" for key in names if where[key])
            self.environment = {"MARIADB_OPTIONS": options, "MYSQL_PWD": where["PASSWORD"]}

    @contextlib.contextmanager
    def start(self, name: str, *command: str, **options: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command under a lock; whatever it started ends with the block."""
        process = subprocess.Popen(
            ["sh", str(SCRIPT), self.database, name, *command],
            env=os.environ | self.environment | options,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)
            process.communicate()

    def run(self, name: str, *command: str, **options: str) -> int:
        """Run a command under a lock, and return the script's exit code."""
        with self.start(name, *command, **options) as process:
            return process.wait(PATIENT)

    def plain(self, sql: str) -> str:
        """Return a line of shell that runs a statement by the plain program."""
        if self.database == "postgresql":
            return f'psql -Xqc "{sql}"'
        return f'mariadb $MARIADB_OPTIONS -e "{sql}"'


def kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def says_in(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "in\n", (line, process.communicate())


@pytest.fixture
def client(database: str) -> Client:
    vendor = connections[database].vendor
    if vendor not in CLIENTS:
        pytest.skip(f"no example for {vendor}")
    if shutil.which(CLIENTS[vendor][1]) is None:
        pytest.skip(f"{CLIENTS[vendor][1]} is not installed")
    return Client(database)


def row(alias: str, name: str) -> Any:
    return SlotRow.objects.using(alias).get(semaphore__name=name, slot=1)


def test_a_script_and_django_keep_one_another_out(client, tmp_path, capsys):
    """The article's example: the table that is synchronised and the customer, in programs of several languages."""
    parts, text = ("sync", r"book\marks:'s", 7), r"sync:book\\marks\:'s:7"
    lock = mutex(parts, timeout=0, using=client.alias)
    done = tmp_path / "done"
    with lock as before:
        assert client.run(text, "true", TIMEOUT="0") == 75
        with client.start(text, "sh", "-c", STAY, str(done), TIMEOUT="120", LEASE="20") as script:
            wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
            before.release()
            says_in(script)
            assert lock.try_acquire() is None
            call_command("locks", "list", "--format", "json", "--database", client.alias)
            [shown] = json.loads(capsys.readouterr().out)
            assert (shown["name"], shown["kind"], shown["waiting"]) == (text, "mutex", 0)
            assert [holder["label"] for holder in shown["holders"]] == [client.program]
            held = row(client.alias, text)
            assert held.token > before.token
            wait_until(lambda: row(client.alias, text).expires_us > held.expires_us, timeout=PATIENT, what="renewal")
            assert row(client.alias, text).token == held.token
            done.touch()
            assert script.wait(PATIENT) == 0
    with lock as after:
        assert after.token > held.token


def test_a_script_that_goes_by_more_slots_gets_those_that_nobody_who_waits_could_use(client):
    few = semaphore("raised", slots=1, timeout=PATIENT, using=client.alias)
    kinds = {"KIND": "semaphore", "TIMEOUT": "0"}
    with few:
        waits = run_beside(lambda: few.acquire().release())
        wait_until(lambda: few.status().waiting == 1)
        assert client.run("raised", "sh", "-c", 'test "${SLOT_AND_TOKEN%% *}" = 2', SLOTS="2", **kinds) == 0
        assert client.run("raised", "true", SLOTS="1", **kinds) == 75
    waits.result(PATIENT)


def test_a_script_that_dies_leaves_the_lock_to_its_lease(client, tmp_path):
    lock = mutex("nightly", timeout=PATIENT, using=client.alias)
    with client.start("nightly", "sh", "-c", STAY, str(tmp_path / "never"), LEASE="6", TIMEOUT="120") as script:
        says_in(script)
        kill(script)
        script.wait(PATIENT)
        held = row(client.alias, "nightly")
        with lock as permit:
            assert permit.token > held.token
            assert row(client.alias, "nightly").acquired_us >= held.expires_us
            assert client.run("nightly", "true", TIMEOUT="0") == 75


def test_a_script_that_waits_is_served_in_its_turn_and_leaves_no_trace_when_it_gives_up(client, tmp_path):
    lock = semaphore("pair", 2, timeout=0, using=client.alias)
    options = {"KIND": "semaphore", "SLOTS": "2"}
    with (
        lock,
        client.start(
            "pair", "sh", "-c", STAY, str(tmp_path / "never"), **options, LEASE="600", TIMEOUT="120"
        ) as script,
    ):
        says_in(script)
        assert lock.status().held == 2
        assert client.run("pair", "true", **options, TIMEOUT="1") == 75
        assert lock.status().waiting == 0
        assert client.run("pair", "true", KIND="mutex") == 64
        with client.start("pair", "sh", "-c", "echo in", **options, TIMEOUT="120") as second:
            wait_until(lambda: lock.status().waiting == 1, timeout=PATIENT)
            with Child("hold", client.alias, "pair", 2) as third:  # a process that comes later is served later
                line = [
                    client.program,
                    "-m tests.support.children",
                ]  # a script that is slow to ask again keeps its place
                wait_until(lambda: [each.label for each in lock.status().waiters] == line, timeout=PATIENT)
                control.revoke("pair", by="ann", using=client.alias)
                says_in(second)
                third.expect("held", timeout=PATIENT)
                third.send()
                third.finish()
            assert second.wait(PATIENT) == 0


def test_a_script_whose_lock_was_taken_away_ends_its_command(client, tmp_path):
    with client.start("nightly", "sh", "-c", STAY, str(tmp_path / "never"), LEASE="4", TIMEOUT="120") as script:
        says_in(script)
        control.revoke("nightly", by="ann", using=client.alias)
        with mutex("nightly", timeout=PATIENT, using=client.alias) as permit:
            assert script.wait(PATIENT) == 76
            permit.check()
            assert row(client.alias, "nightly").token == permit.token


CROWD = """
from django_sqlsem import mutex
from tests.support.databases import OutsideCounter
alias, rounds = args
lock = mutex("crowd", timeout=150, using=alias)
with OutsideCounter(alias) as counter:
    say("ready")
    listen()
    for _ in range(rounds):
        with lock, counter.inside():
            pass
say("done")
"""


@pytest.mark.timeout(400)
def test_one_is_inside_however_many_languages_try(client, counter, tmp_path):
    rounds, scripts, children = 4, 2, 2
    lines = [client.plain(f"UPDATE testapp_probe SET {COUNT[what]} WHERE name = 'probe'") for what in COUNT]
    work = tmp_path / "work.sh"
    work.write_text("\n".join(lines))
    loop = tmp_path / "loop.sh"
    again = f'sh "{SCRIPT}" {client.database} crowd sh "{work}" || exit 1\n'
    loop.write_text(again * rounds)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(Child(CROWD, client.alias, 10 * rounds)) for _ in range(children)]
        for child in others:
            child.expect("ready", timeout=PATIENT)
        environment = os.environ | client.environment | {"TIMEOUT": "150"}
        loops = [
            subprocess.Popen(["sh", str(loop)], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
            for _ in range(scripts)
        ]
        for process in loops:
            stack.callback(process.wait)
            stack.callback(kill, process)
        for child in others:
            child.send()
        for child in others:
            child.expect("done", timeout=180)
        assert [process.wait(180) for process in loops] == [0] * scripts
    entered = scripts * rounds + children * 10 * rounds
    assert (counter.peak, counter.entered, counter.current) == (1, entered, 0)


def test_every_client_has_every_verb():
    for database, _program in CLIENTS.values():
        assert {path.stem for path in Path(SCRIPT.parent, database).glob("*.sql")} == {"take", "renew", "release"}
