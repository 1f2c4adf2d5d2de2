"""``claim()`` in one process: what it takes and refuses, and what becomes of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import connections, transaction
from django.db.models import Count, F, QuerySet
from django.urls import reverse

from django_sqlsem import (
    AcquireTimeoutError,
    PermitLostError,
    SemaphoreError,
    claims,
    control,
    queries,
    testing,
)
from django_sqlsem.backends import get_backend
from django_sqlsem.claims import Claim, claim, recover
from django_sqlsem.locks.permit import Permit
from django_sqlsem.models import ClaimRow
from tests.support import databases
from tests.support.threads import run_in_threads, wait_until
from tests.testapp.models import CountedInventory, Inventory, Job, Stage, Warehouse

NAME = "claim:testapp_inventory.status"


def rows(database="default"):
    return Inventory.objects.using(database).order_by("pk")


def make(database="default", count=1, **fields):
    return [Inventory.objects.using(database).create(**fields) for _nth in range(count)]


def statuses(database="default"):
    return list(rows(database).values_list("status", flat=True))


def owned(database="default"):
    return ClaimRow.objects.using(database).count()


def test_rows_are_finished_and_given_back_one_by_one(database):
    one, two, three, four = make(database, 4)
    with contextlib.suppress(ZeroDivisionError), claim(rows(database), n=10, using=database) as claimed:
        assert [row.pk for row in claimed] == [one.pk, two.pk, three.pk, four.pk]
        assert len(claimed) == 4
        assert claimed[1].status == "Calculating"
        assert statuses(database) == ["Calculating"] * 4
        (snapshot,) = queries.semaphores(using=database)
        assert (snapshot.name, snapshot.kind, snapshot.held) == (NAME, "claim", 1)
        assert claimed.finish(claimed[0])
        assert claimed.finish(two, status="Odd")  # any instance of the row will do
        assert claimed.give_back(claimed[2])
        assert claimed[0].status == "Calculated"
        assert claimed[2].status == "Not Started"
        with pytest.raises(ValueError, match="was finished or given back already"):
            claimed.finish(claimed[0])
        with pytest.raises(ValueError, match="needs another status than 'Calculating'"):
            claimed.finish(claimed[3], status="Calculating")  # it would never come back
        with pytest.raises(ValueError, match="4 rows were claimed"):
            _ = claimed.one
        # A block inside the block takes what is there.
        with claim(rows(database), using=database) as inner:
            assert inner.one.pk == three.pk
        raise ZeroDivisionError
    assert statuses(database) == ["Calculated", "Odd", "Calculated", "Not Started"]
    assert owned(database) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_a_block_that_is_interrupted_has_not_done_its_rows(database, error):
    make(database)
    with pytest.raises(error), claim(rows(database), using=database):
        raise error
    assert (statuses(database), owned(database)) == (["Not Started"], 0)


def test_rows_that_can_not_be_given_back_do_not_hide_the_error_of_the_block(database, caplog):
    def fail_in_a_transaction_that_can_only_be_rolled_back(stack):
        stack.enter_context(transaction.atomic(using=database))
        transaction.set_rollback(True, using=database)
        raise ValueError("the user's own")

    (row,) = make(database)
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="own"), claim(rows(database), using=database):
        fail_in_a_transaction_that_can_only_be_rolled_back(stack)
    assert "are left to the next worker to be given back" in caplog.text
    assert (statuses(database), owned(database)) == (["Calculating"], 1)
    assert recover(Inventory.objects.using(database), using=database) == [row.pk]
    assert statuses(database) == ["Not Started"]


def test_a_row_of_another_model_is_refused(database):
    (row,) = make(database)
    with claim(rows(database), using=database) as claimed:
        for act in (claimed.finish, claimed.give_back):
            with pytest.raises(TypeError, match="is an instance of Inventory, not"):
                act(Job(pk=row.pk))
        assert statuses(database) == ["Calculating"]
    assert statuses(database) == ["Calculated"]


def test_a_claim_that_the_model_of_today_can_not_read_keeps_no_row_from_being_taken(database, monkeypatch, caplog):
    (row,) = make(database)
    with claim(rows(database), using=database):
        ClaimRow.objects.using(database).update(object_pk="abc", token=F("token") - 1_000_000)
        rows(database).update(status="Not Started")
    monkeypatch.setattr(claims.rows, "_looked", {})  # it is time to look for rows whose worker is gone
    caplog.clear()
    with claim(rows(database), using=database) as claimed:
        assert claimed.one == row
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "testapp.Inventory abc can't be given back, as its model has changed" in caplog.text
    assert recover(Inventory.objects.using(database), using=database) == []
    assert list(ClaimRow.objects.using(database).values_list("object_pk", flat=True)) == ["abc"]


def test_a_status_changed_by_hand_is_respected(database, caplog):
    one, _two, three = make(database, 3)
    with claim(rows(database), n=3, using=database) as claimed:
        Inventory.objects.using(database).filter(pk=one.pk).update(status="Halted")
        Inventory.objects.using(database).filter(pk=three.pk).delete()
    assert statuses(database) == ["Halted", "Calculated"]
    assert caplog.text.count("its status was changed meanwhile") == 2

    rows(database).update(status="Not Started")
    caplog.clear()
    with claim(rows(database), using=database) as claimed:
        rows(database).update(status="Not Started")
        with claim(rows(database), using=database) as second:  # free to be taken, as the status says
            assert second.one == claimed.one
            assert not claimed.finish(claimed.one)
            assert statuses(database)[0] == "Calculating"
        assert "somebody else has it" in caplog.text
    assert statuses(database) == ["Calculated", "Not Started"]
    assert owned(database) == 0


@contextlib.contextmanager
def lost_at_the_end():
    with pytest.raises(PermitLostError, match=NAME):
        yield


def revoke(database, name=NAME):
    assert control.revoke(name, by="ann", using=database)


@pytest.mark.rows_only("lease")
def test_a_revoked_permit_gives_its_rows_back_and_says_so(database):
    (row,) = make(database)
    lost = claim(rows(database), using=database)
    with lost_at_the_end(), lost:
        lost.check()
        revoke(database)
        with pytest.raises(PermitLostError, match=NAME):
            lost.finish(lost.one)
        assert statuses(database) == ["Calculating"]
    assert statuses(database) == ["Not Started"]
    assert owned(database) == 0

    # What the operator took away is given back by others too, while the worker goes on; and may be taken again.
    late = claim(rows(database), using=database)
    with lost_at_the_end(), late:
        revoke(database)
        assert recover(Inventory.objects.using(database), using=database) == [row.pk]
        assert statuses(database) == ["Not Started"]
        successor = claim(rows(database), using=database).__enter__()
        assert successor.one == row
    assert statuses(database) == ["Calculating"]
    successor.__exit__(None, None, None)
    assert statuses(database) == ["Calculated"]
    assert owned(database) == 0


@pytest.mark.rows_only("lease")
def test_a_worker_that_is_stopped_between_its_last_look_and_the_write_changes_nothing(database, monkeypatch):
    make(database)
    successor = claim(rows(database), done="Other", using=database)
    late = claim(rows(database), using=database)

    backend = get_backend(database)
    standing = backend.standing

    def and_then_stopped(*args):
        found = standing(*args)
        monkeypatch.undo()
        revoke(database)
        assert recover(Inventory.objects.using(database), using=database)
        assert successor.__enter__()
        return found

    with lost_at_the_end(), late:
        monkeypatch.setattr(backend, "standing", and_then_stopped)
        late.finish(late.one)
    assert statuses(database) == ["Calculating"]
    assert owned(database) == 1
    successor.__exit__(None, None, None)
    assert statuses(database) == ["Other"]


def test_a_connection_that_died_during_the_work_is_opened_anew(database):
    connection = connections[database]
    if connection.vendor not in ("postgresql", "mysql"):
        pytest.skip("there is no session that could be ended")
    make(database)
    with claim(rows(database), using=database), connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if connection.vendor == "postgresql" else "SELECT CONNECTION_ID()")
        (session,) = cursor.fetchone()
        end = "SELECT pg_terminate_backend(%s)" if connection.vendor == "postgresql" else "KILL %s"
        with contextlib.closing(databases.raw_connection(database)) as other:
            other.cursor().execute(end, (session,))
    assert statuses(database) == ["Calculated"]


def test_a_status_can_be_committed_together_with_the_result(database):
    make(database, 2)
    with claim(rows(database), n=2, using=database) as claimed:
        good, bad = claimed
        with transaction.atomic(using=database):
            good.priority = 7
            good.save(using=database, update_fields=["priority"])
            assert claimed.finish(good)
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
            bad.priority = 7
            bad.save(using=database, update_fields=["priority"])
            assert claimed.finish(bad)
            raise ZeroDivisionError
        assert statuses(database) == ["Calculated", "Calculating"]
    assert list(rows(database).values_list("status", "priority")) == [("Calculated", 7), ("Not Started", 0)]
    assert owned(database) == 0


@pytest.mark.parametrize("outer", [False, True], ids=["transaction", "savepoint"])
def test_a_row_whose_transaction_is_rolled_back_can_be_finished_in_the_next(database, outer):
    one, two, three = make(database, 3)
    around = transaction.atomic(using=database) if outer else contextlib.nullcontext()
    with claim(rows(database), n=3, using=database) as claimed:
        with around:
            for last in (False, True):
                with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=database):
                    assert claimed.finish(claimed[0])
                    assert claimed.give_back(two)
                    with pytest.raises(ValueError, match="was finished or given back already"):
                        claimed.finish(claimed[0])
                    assert last or 1 / 0
        with pytest.raises(ValueError, match="was finished or given back already"):
            claimed.give_back(one)
        assert statuses(database) == ["Calculated", "Not Started", "Calculating"]
        assert list(ClaimRow.objects.using(database).values_list("object_pk", flat=True)) == [str(three.pk)]
    assert statuses(database) == ["Calculated", "Not Started", "Calculated"]
    assert owned(database) == 0


def test_all_workers_busy(database):
    (first, _second) = make(database, 2)
    with claim(rows(database), workers=1, using=database):
        with pytest.raises(AcquireTimeoutError, match=NAME), claim(rows(database), workers=1, using=database):
            pass
        assert statuses(database) == ["Calculating", "Not Started"]
    entered = threading.Event()

    def work(nth):
        if nth == 0:
            with claim(rows(database), workers=1, done="Not Started", using=database) as claimed:
                entered.set()
                wait_until(lambda: queries.semaphore(NAME, using=database).waiting == 1, timeout=40)
        else:
            assert entered.wait(40)
            with claim(rows(database), workers=1, timeout=60, using=database) as claimed:
                assert claimed.permit.waited > 0
        return claimed.one.pk

    rows(database).update(status="Not Started")
    make(database)
    assert run_in_threads(2, work)[0] == first.pk
    assert sorted(statuses(database)) == ["Calculated", "Not Started", "Not Started"]


@pytest.mark.parametrize("inside", [False, True], ids=["committed", "in a TestCase"])
def test_async(request, inside):
    request.getfixturevalue("db" if inside else "committed")
    make(count=4)

    async def main():
        async with claim(rows(), n=2) as claimed:
            assert await claimed.afinish(claimed[0], status="Odd")
            assert await claimed.agive_back(claimed[1])
        async with claim(rows()) as claimed:
            assert claimed.one.status == "Calculating"
        with contextlib.suppress(ZeroDivisionError):
            async with claim(rows(), n=5) as claimed:
                assert len(claimed) == 2
                raise ZeroDivisionError
        with pytest.raises(SynchronousOnlyOperation), claim(rows()):
            pass
        entered = asyncio.Event()

        async def be_cancelled():
            async with claim(rows()):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(be_cancelled())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async_to_sync(main)()
    assert statuses() == ["Odd", "Calculated", "Not Started", "Not Started"]
    assert owned() == 0


@pytest.mark.parametrize("step", ["_take", "_end"])
def test_a_task_that_is_cancelled_while_a_thread_writes_leaves_no_row_behind(database, monkeypatch, step):
    make(database, 2)
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()
    original = getattr(Claim, step)

    def hindered(claimed, *args):
        monkeypatch.undo()
        begun.set()
        assert go_on.wait(40)
        try:
            original(claimed, *args)
        finally:
            over.set()

    async def work():
        async with claim(rows(database), n=2, using=database):
            pass

    async def main():
        monkeypatch.setattr(Claim, step, hindered)
        task = asyncio.create_task(work())
        assert await asyncio.to_thread(begun.wait, 40)
        task.cancel()
        for _turn in range(10):  # it is told before the thread goes on
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(over.wait, 40)

    async_to_sync(main)()
    # What was done when the task was cancelled is done.
    assert set(statuses(database)) == {"Not Started" if step == "_take" else "Calculated"}
    assert owned(database) == 0


def test_in_a_testcase_claims_are_as_private_as_the_data(db):
    one, two = make(count=2)
    with contextlib.suppress(PermitLostError), claim(rows()) as claimed:
        with contextlib.suppress(PermitLostError), claim(rows()) as other:
            with claim(rows()) as third:
                assert not third
            assert statuses() == ["Calculating"] * 2
            with testing.lost(claimed.permit), pytest.raises(PermitLostError):
                claimed.finish(claimed.one)
            assert recover(Inventory) == []  # its slot is still taken
            revoke("default")
            assert recover(Inventory) == [one.pk, two.pk]
        assert statuses() == ["Not Started"] * 2
        assert other.permit.lost.by == "ann"
    assert statuses() == ["Not Started"] * 2
    with transaction.atomic(), pytest.raises(transaction.TransactionManagementError, match="outside atomic"):
        recover(Inventory)


def test_the_admin_lists_who_has_which_row(database, settings, client):
    settings.SQLSEM = {"DATABASE": database}
    client.force_login(User.objects.create(username="boss", is_staff=True, is_superuser=True))
    (row,) = make(database)
    with claim(rows(database)) as claimed:
        page = client.get(reverse("admin:sqlsem_claimrow_changelist")).content.decode()
        assert "testapp.Inventory" in page
        assert f"pid {os.getpid()}" in re.sub(r"\s", " ", page)
        assert 'class="field-since' in page
        known = ClaimRow.objects.using(database).get()
        assert known.object_pk == str(row.pk)
        page = client.get(reverse("admin:sqlsem_claimrow_change", args=[known.pk])).content.decode()
        assert str(claimed.permit.token) in page
        assert "deletelink" not in page


def shapes(database):
    here, there = (Warehouse.objects.using(database).create(name=name) for name in ("here", "there"))
    for priority in (1, 3, 2):
        Inventory.objects.using(database).create(priority=priority, warehouse=here)
    Inventory.objects.using(database).create(priority=9, warehouse=there)
    Inventory.objects.using(database).create(priority=5)
    found = Inventory.objects.using(database)
    return {
        "ordered": (found.order_by("-priority"), [9, 5]),
        "joined": (found.filter(warehouse__name="here").order_by("-priority"), [3, 2]),
        "nullable join": (found.select_related("warehouse").order_by(F("warehouse__name").desc(), "-priority"), None),
        "twice": (found.filter(warehouse__inventory__worked=0, warehouse__name="here").order_by("-priority"), None),
        "distinct": (found.filter(warehouse__inventory__worked=0).distinct().order_by("priority"), [1, 2]),
        "aggregated": (
            found.annotate(many=Count("warehouse__inventory")).filter(many__gt=2).order_by("priority"),
            [1, 2],
        ),
        "filtered by the status": (found.filter(status="Not Started").order_by("priority"), [1, 2]),
        "related": (here.inventory_set.order_by("-priority"), [3, 2]),
        "locking": (found.select_for_update().order_by("priority"), [1, 2]),
        "none": (found.none(), []),
    }


def test_querysets_of_many_shapes(database):
    for shape, (queryset, expected) in shapes(database).items():
        with claim(queryset, n=2, done="Not Started", using=database) as claimed:
            found = [row.priority for row in claimed]
            assert expected is None or found == expected, shape
            assert expected is not None or 1 <= len(found) <= 2, shape
            assert statuses(database).count("Calculating") == len(found), shape
        if shape == "aggregated":
            assert claimed[0].many == 3
    assert set(statuses(database)) == {"Not Started"}


def test_a_model_with_keys_columns_and_managers_of_its_own(database):
    jobs = Job.objects.using(database)
    shown = jobs.create()
    Job(hidden=True).save(using=database)
    with claim(jobs, Stage.WAITING, Stage.RUNNING, 2, field="stage", using=database) as claimed:
        assert claimed.one == shown
        assert claimed.one.stage == Stage.RUNNING
        jobs.update(hidden=True)  # no manager sees it any more
    everything = QuerySet(Job, using=database)
    assert sorted(everything.values_list("stage", flat=True)) == [Stage.WAITING, Stage.DONE]
    with claim(everything, Stage.WAITING, Stage.RUNNING, Stage.DONE, field="stage", using=database) as claimed:
        assert claimed
    assert set(everything.values_list("stage", flat=True)) == {Stage.DONE}
    assert owned(database) == 0


@pytest.mark.rows_only("lease")
def test_a_status_may_be_null_or_a_boolean(database):
    jobs = Job.objects.using(database)
    job = jobs.create(outcome=None)
    names = (None, "busy", "done", "outcome")
    with contextlib.suppress(ZeroDivisionError), claim(jobs, *names, using=database) as claimed:
        assert claimed.one.outcome == "busy"
        raise ZeroDivisionError
    assert jobs.get().outcome is None
    with contextlib.suppress(PermitLostError), claim(jobs, False, True, False, "urgent", using=database):
        assert jobs.get().urgent is True
        # Two columns of one row are claimed apart.
        with contextlib.suppress(PermitLostError), claim(jobs, *names, using=database) as other:
            assert other.one == job
            for column in ("urgent", "outcome"):
                revoke(database, f"claim:testapp_job.{column}")
                assert recover(jobs, column, using=database) == [job.pk]
        assert (jobs.get().outcome, jobs.get().urgent) == (None, False)
    assert owned(database) == 0


def test_a_child_table_shares_the_status_column_of_its_parent(database):
    counted = CountedInventory.objects.using(database).create(shelves=3)
    with claim(CountedInventory.objects.using(database), using=database) as claimed:
        assert claimed.one.shelves == 3
        with claim(rows(database), using=database) as other:
            assert not other
        rows(database).update(status="Not Started")
        with claim(rows(database), using=database) as other:
            assert other.one.pk == counted.pk
    assert statuses(database) == ["Calculated"]
    assert owned(database) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((), {"field": "stauts"}, ValueError, "one of status, priority"),
        ((), {"field": "id"}, ValueError, "must be a column"),
        ((), {"field": None}, TypeError, "name of a field"),
        ((), {"done": "Calculating"}, ValueError, "status and done must differ"),
        ((), {"from_status": "Calculating"}, ValueError, "status and from_status must differ"),
        ((), {"from_status": None}, ValueError, "from_status=None .* must not be null"),
        ((), {"status": "C" * 21}, ValueError, "at most 20 characters"),
        ((), {"field": "priority"}, ValueError, "from_status='Not Started' is no value of testapp.Inventory.priority"),
        ((), {"n": 0}, ValueError, "n must be from 1"),
        ((), {"n": "1"}, TypeError, "n must be an int"),
        ((), {"workers": 0}, ValueError, "workers must be from 1"),
        ((), {"timeout": -1}, ValueError, "timeout must be from 0"),
        ((), {"using": "elsewhere"}, ImproperlyConfigured, "elsewhere"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(committed, arguments, options, error, words):
    with pytest.raises(error, match=words):
        claim(rows(), *arguments, **options)


def test_what_can_not_be_claimed_is_refused(committed, monkeypatch):
    for what, error, words in (
        (Inventory, TypeError, "takes a queryset"),
        (rows().values("pk"), TypeError, "model instances"),
        (rows()[:3], ValueError, "not sliced"),
        (rows().union(rows()), ValueError, "union"),
    ):
        with pytest.raises(error, match=words):
            claim(what)
    with pytest.raises(ValueError, match="its choices are 0, 1, 2"):
        claim(Job.objects.all(), 0, 1, 3, field="stage")
    for alias in set(databases.covered()) - {"default"}:
        with pytest.raises(ImproperlyConfigured, match=f"give using='{alias}'"):
            claim(rows(alias))
    make()
    with pytest.raises(transaction.TransactionManagementError), transaction.atomic(), claim(rows()):
        pass
    used = claim(rows())
    with pytest.raises(RuntimeError, match="with claim"):
        list(used)
    with used, pytest.raises(RuntimeError, match="for one block"):
        used.__enter__()
    make()
    with monkeypatch.context() as patch:
        patch.setattr(Permit, "token", None)
        with pytest.raises(SemaphoreError, match="RECORD"), claim(rows()):
            pass
    assert statuses() == ["Calculated", "Not Started"]
