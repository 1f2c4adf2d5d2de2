"""Asking the holder of an application lock to stop: who has a row hears of it with the proof of possession."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from django_sqlsem import (
    SemaphoreError,
    control,
    queries,
    semaphore,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock import calls
from django_sqlsem.backends.applock.sessions import LockSession
from tests.backends.applock.plain import ALIAS, skip_unless_covered
from tests.support.databases import held_rows
from tests.support.operators import locks
from tests.support.threads import wait_until

skip_unless_covered()


@pytest.fixture
def alias(committed):
    yield ALIAS
    wait_until(lambda: held_rows(ALIAS) == [], timeout=20)


def test_without_rows_nobody_can_be_asked_and_that_is_said(alias, settings):
    settings.SQLSEM = {"RECORD": False}
    lock = semaphore("unrecorded", slots=2, using=alias)
    with lock.acquire() as permit:
        assert permit.token is None
        with pytest.raises(SemaphoreError, match=r"set SQLSEM\['RECORD'\] to True"):
            control.request_stop("unrecorded", 1, 1, by="ann", using=alias)
        assert not permit.stop_requested


def test_a_proof_is_one_call_whether_somebody_is_asked_or_not(alias, monkeypatch):
    with semaphore("one", using=alias).acquire() as one, semaphore("two", using=alias).acquire() as two:
        backend, helds = get_backend(alias), [one._acquisition.acquired, two._acquisition.acquired]
        quiet = backend.renew(backend.session(), helds)
        control.request_stop("two", by="ann", using=alias)
        wait_until(lambda: two.stop_requested, timeout=20)
        sent, real = [], LockSession._execute

        def execute(session, text, *args, **kwargs):
            sent.append(text)
            return real(session, text, *args, **kwargs)

        monkeypatch.setattr(LockSession, "_execute", execute)
        told = backend.renew(backend.session(), helds)
        sessions = {session for session in backend.pool.sessions() if session.held}
        assert quiet.asked == {}
        assert told.asked == {two._acquisition.permit_id: "ann"}
        assert told.renewed == quiet.renewed == {held.permit_id for held in helds}
        # The keeper may prove them at the same moment.
        proofs = [text for text in sent if text == calls.PROVE.text]
        assert len(sessions) <= len(proofs) <= 2 * len(sessions)
        assert (one.stop_requested, two.stop_requested_by) == (False, "ann")


def test_the_command_says_why_a_program_without_rows_cannot_be_asked(alias, settings, capsys):
    semaphore("plain", slots=2, using=alias).acquire().release()  # a name with rows
    settings.SQLSEM = {"RECORD": False}
    with semaphore("plain", slots=2, using=alias).acquire():
        settings.SQLSEM = {}
        with pytest.raises(CommandError, match="keeps no row of it, and can't be asked to stop"):
            locks("stop", "plain", "--database", alias)
        assert control.drain("plain", by="ann", using=alias)
    assert not queries.semaphore("plain", using=alias).draining
