"""The campaign's judge finds what it is there to find; and a little of the campaign itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.proof import judge
from tests.proof.judge import LIVE, Line, Log, Rules
from tests.support import databases, programs

#: For how long each fault goes on here, in seconds: ``make proof`` has hours.
SECONDS = 7
SHORT = {
    "sqlite": ("kill", "stop", "locked"),
    "postgres": ("kill", "sessions", "crash", "lost answers"),
    "mariadb": ("kill", "restart", "cut", "signals"),
}


def judged(events, **rules):
    """Judge events at whole seconds: ``(second, kind, pid, slot, note)``; tokens grow with the slot's entries."""
    lines, tokens = [], {}
    for number, (at, kind, pid, *more) in enumerate(events):
        slot, note = (*more, *(0, "")[len(more) :])
        if kind == "I":
            tokens[pid] = number + 1
        token = tokens.get(pid, 0) if kind in "IO" else 0
        lines.append(Line(round((at + 1) * 1e9), number, kind, pid, "main", slot, token, note))
    return judge.judge(lines, Rules(**({"slots": 2, "lease": 3.0, "idle": 2.0} | rules)))


def what(verdict):
    return [said for said, _ in verdict.broken]


def turn(pid, slot, since, until, note=LIVE):
    return [(since, "W", pid), (since, "I", pid, slot), (until, "O", pid, slot, note)]


def test_a_campaign_without_a_mistake():
    verdict = judged(turn(1, 1, 0, 2) + turn(2, 2, 1, 4) + turn(3, 1, 2, 3))
    assert (verdict.grants, verdict.over, verdict.broken) == (3, 0, [])


def test_one_too_many_is_found():
    verdict = judged(turn(1, 1, 0, 4) + turn(2, 2, 1, 4) + turn(3, 1, 3, 5))
    assert verdict.over == 1
    assert what(verdict) == ["3 at once"]


def test_who_found_its_permit_lost_does_not_count():
    stopped = [(0, "W", 1), (0, "I", 1, 1), (1, "S", 1), (9, "C", 1), (9, "O", 1, 1, "expired")]
    verdict = judged(stopped + turn(2, 2, 1, 8) + turn(3, 1, 5, 6))
    assert (verdict.lost, verdict.over, verdict.broken) == (1, 0, [])


def test_who_was_stopped_and_still_believes_in_its_permit_counts():
    stopped = [(0, "W", 1), (0, "I", 1, 1), (1, "S", 1), (9, "C", 1), (9, "O", 1, 1, LIVE)]
    assert "3 at once" in what(judged(stopped + turn(2, 2, 1, 8) + turn(3, 1, 5, 6)))


def test_who_is_killed_has_its_slot_until_then_and_no_longer():
    killed = [(0, "W", 1), (0, "I", 1, 1), (3, "K", 1)]
    assert judged(killed + turn(2, 2, 1, 8) + turn(3, 1, 4, 5)).broken == []
    assert what(judged(killed + turn(2, 2, 1, 8) + turn(3, 1, 2, 5))) == ["3 at once"]


def test_who_may_not_have_heard_of_a_fault_counts_until_the_fault():
    before = [*turn(1, 1, 0, 4), *turn(2, 2, 1, 4), (2, "F", 0), (2.5, "f", 0)]
    events = [*before, *turn(3, 1, 3, 5)]
    assert what(judged(events)) == ["3 at once"]
    assert judged(events, heard=2.0).broken == []
    assert what(judged(events, heard=1.0)) == ["3 at once"]  # it had to know by then
    assert judged([*before, (1, "W", 3), (3, "I", 3, 1), (4, "O", 3, 1, LIVE)], heard=2.0).broken == []  # told late
    assert what(judged([*before, *turn(3, 1, 1.5, 5)], heard=9.0)) == ["3 at once"]


def test_an_operators_number_counts_at_the_grant():
    resized = [(10, "N", 0, 1), (11, "n", 0, 1)]
    assert what(judged([*resized, *turn(1, 1, 20, 25), *turn(2, 2, 21, 22)])) == ["2 at once"]
    assert judged([*resized, *turn(1, 1, 20, 25), *turn(2, 2, 9, 21)]).broken == []  # it was inside before
    more = [(10, "N", 0, 3), (11, "n", 0, 3)]
    assert judged([*more, *turn(1, 1, 20, 25), *turn(2, 2, 21, 25), *turn(3, 3, 22, 25)]).broken == []


def test_a_grant_in_a_pause_is_found():
    paused = [(10, "N", 0, 0), (11, "n", 0, 0)]
    assert what(judged([*paused, *turn(1, 1, 12, 13)])) == ["granted while nothing was to be granted"]
    late = [(9, "W", 1), (15, "I", 1, 1), (16, "O", 1, 1, LIVE)]
    assert what(judged([*paused, *late])) == ["granted while nothing was to be granted"]
    soon = [(9, "W", 1), (11.5, "I", 1, 1), (16, "O", 1, 1, LIVE)]
    assert judged([*paused, *soon]).broken == []  # granted just before


def test_a_free_slot_that_nobody_gets_is_found():
    verdict = judged([*turn(1, 1, 0, 1), *turn(9, 2, 0, 9), (1, "W", 2), (6, "I", 2, 1), (7, "O", 2, 1, LIVE)])
    assert verdict.idle == 5
    assert what(verdict) == ["slot 1 stood idle for 5.00 s"]
    assert judged([*turn(1, 1, 0, 1), *turn(9, 2, 0, 9), *turn(2, 1, 6, 7)]).broken == []  # nobody waited
    waits_for_ever = [*turn(1, 1, 0, 1), *turn(9, 2, 0, 9), (1, "W", 2), (8, "G", 2, 0, "AcquireTimeoutError")]
    assert "slot 1 stood idle for 7.00 s" in what(judged(waits_for_ever))


@pytest.mark.parametrize(("begins", "ends"), [("A", "a"), ("N", "n")])
def test_a_slot_is_not_idle_while_nobody_can_get_it(begins, ends):
    events = [*turn(1, 1, 0, 1), *turn(9, 2, 0, 9), (1, "W", 2), (1.5, begins, 0, 0), (2, ends, 0, 0)]
    back = [(6, begins, 0, 2), (6.5, ends, 0, 2)] if begins == "N" else [(1.5, "A", 0), (6.5, "a", 0)]
    events = events[:-2] + back if begins == "A" else events + back
    assert judged([*events, (7, "I", 2, 1), (7.5, "O", 2, 1, LIVE)]).idle == pytest.approx(0.5)


def test_a_slot_of_one_that_is_stopped_is_free_after_its_lease():
    events = [*turn(9, 2, 0, 20), (0, "W", 1), (0, "I", 1, 1), (1, "S", 1), (1, "W", 2), (9, "I", 2, 1)]
    verdict = judged([*events, (9, "O", 2, 1, LIVE), (20, "O", 1, 1, "expired")])
    assert what(verdict) == ["slot 1 stood idle for 5.00 s"]


def test_a_body_that_never_ends_a_token_that_does_not_grow_and_a_process_that_ends_are_found():
    assert what(judged([(0, "W", 1), (0, "I", 1, 1)])) == ["somebody went in and never came out"]
    assert what(judged([(0, "E", 1, 0, "-11")])) == ["process 1 ended by itself: -11"]
    assert judged([(0, "E", 1, 0, "-11")], may_end=True).broken == []
    assert what(judged([(0, "B", 1, 0, "TypeError")])) == ["seen by 1 main: TypeError"]
    lines = [Line(at, at, kind, 1, "main", 1, 7, LIVE) for at, kind in enumerate("WIOWIO", 1)]
    assert what(judge.judge(lines, Rules())) == ["a token that did not grow"]


def test_the_log_keeps_what_is_written(tmp_path):
    path = str(tmp_path / "log")
    log = Log(path)
    log.write("I", "main", 3, 2**62, "a note of more than thirty characters, cut", at=5, pid=77)
    log.write("K", pid=7)
    first, second = judge.read(path)
    assert first == Line(5, 0, "I", 77, "main", 3, 2**62, "a note of more than thirty cha")
    assert (second.kind, second.pid, second.note) == ("K", 7, "")
    assert second.at <= judge.now()
    assert (tmp_path / "log").stat().st_size == 2 * judge.SIZE


@pytest.mark.parametrize("database", SHORT)
def test_a_little_of_the_campaign(database):
    if database != "sqlite":
        programs.need("initdb" if database == "postgres" else "mariadbd")
    names = SHORT[database]
    command = [sys.executable, "-m", "tests.proof.campaign", "--database", database, "--fault", *names]
    command += ["--seconds", str(SECONDS * len(names))]
    environment = databases.child_environment()
    del environment["SQLSEM_TEST_DATABASES"], environment["SQLSEM_TEST_SETTINGS"]
    done = subprocess.run(
        command, cwd=databases.ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["fault"] for each in results] == list(names)
    assert all(each["grants"] and each["faults"] and not each["broken"] for each in results)
