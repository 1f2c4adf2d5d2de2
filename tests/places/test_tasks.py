"""Tasks of ``django.tasks`` in real workers of the database backend."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import signal
from types import SimpleNamespace

import pytest
from django.utils import timezone

from django_sqlsem import mutex, semaphore
from django_sqlsem.contrib import tasks
from django_sqlsem.contrib.celery import MAX_COUNTDOWN
from django_sqlsem.contrib.tasks import SENT_AGAIN_AS
from tests.places.tasks_notes import notes
from tests.support.databases import OutsideCounter, assert_nothing_held, held_rows
from tests.support.processes import Child
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side("postgres")

APP = "tests.places.tasks_app"


def child(alias, function, *args):
    """A process of the project with the tasks, whose database is that of ``alias``."""
    env = {"DJANGO_SETTINGS_MODULE": "tests.places.tasks_settings", "SQLSEM_TEST_TASKS_DATABASE": alias}
    return Child(f"{APP}:{function}", *args, env=env)


class Client:
    """Asks a process of the project."""

    def __init__(self, child):
        self.child = child

    def ask(self, expression):
        """Return the value of an expression there."""
        self.child.send(expression)
        return json.loads(self.child.expect())

    def put(self, name, *args, **options):
        """Enqueue a task; return its result's id."""
        return self.ask(f"put({name!r}, *{args!r}, **{options!r})")


@contextlib.contextmanager
def project(alias):
    """A client, and the table of the tasks as long as it is there."""
    with child(alias, "client") as process:
        client = Client(process)
        client.ask("tables(True)")
        try:
            yield client
        finally:
            client.ask("tables(False)")


@pytest.fixture(scope="module")
def one_client(django_db_setup):
    with project("default") as client:
        yield client


@pytest.fixture
def client(one_client, committed):
    """A client of a project on SQLite, without tasks as yet."""
    one_client.ask("DBTaskResult.objects.all().delete()")
    yield one_client
    assert_nothing_held("default")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "notes")


def test_a_busy_task_is_enqueued_again_for_later(client, path):
    with semaphore("plain").acquire():
        first = client.put("plain", path, "word")
        assert client.ask("run_batch()") == 1
        assert notes(path) == []
        refused = client.ask(f"state({first!r})")
        second = refused["return_value"][SENT_AGAIN_AS]
        assert refused["status"] == "SUCCESSFUL"
        assert refused["return_value"] == {SENT_AGAIN_AS: second}
        again = client.ask(f"state({second!r})")
        assert 0.4 <= again["later"] <= MAX_COUNTDOWN
        assert client.ask(f"last({first!r})") == {"id": second, "status": "READY", "value": None}
        assert client.ask("due()") == 1
        assert client.ask("run_batch()") == 1
    third = client.ask(f"last({first!r})")["id"]
    assert third not in (first, second)
    client.ask("due()")
    assert client.ask("run_batch()") == 0
    done = {"id": third, "status": "SUCCESSFUL", "value": "word"}
    assert [client.ask(f"last({each!r})") for each in (first, second, third)] == [done] * 3
    assert [line["word"] for line in notes(path)] == ["word"]
    assert notes(path)[0]["label"] == f"{APP}.plain[{third}]"


def test_the_options_of_a_task_stay(client, path):
    with semaphore("context:x").acquire():
        first = client.put("with_context", path, "x", priority=9, backend="second")
        assert client.ask("run_batch('--backend=second', '--queue-name=*')") == 1
        again = client.ask(f"state(last({first!r})['id'])")
    assert again["queue_name"] == "other"
    assert (again["priority"], again["backend_name"]) == (9, "second")
    assert again["args_kwargs"] == {"args": [path, "x"], "kwargs": {}}
    client.ask("due()")
    assert client.ask("run_batch('--backend=second', '--queue-name=*')") == 0
    last = client.ask(f"last({first!r})")
    assert last["value"] == "x"
    assert [(line["attempt"], line["id"]) for line in notes(path)] == [(1, last["id"])]


def test_an_asynchronous_task(client, path):
    with semaphore("async").acquire():
        first = client.put("asynchronous", path)
        assert client.ask("run_batch()") == 1
    client.ask("due()")
    assert client.ask("run_batch()") == 0
    assert client.ask(f"last({first!r})")["value"] == "async"
    followed = f"async_to_sync(alatest)(default_task_backend.get_result({first!r})).return_value"
    assert client.ask(f"__import__('asgiref.sync').sync.{followed}") == "async"
    assert [line["label"].partition("[")[0] for line in notes(path)] == [f"{APP}.asynchronous"]


@pytest.mark.parametrize(
    ("name", "status", "value"),
    [("strict", "FAILED", None), ("skipped", "SUCCESSFUL", None), ("told", "SUCCESSFUL", "busy: told")],
)
def test_other_policies(client, path, name, status, value):
    with semaphore(name).acquire():
        task = client.put(name, path)
        assert client.ask("run_batch()") == 0
    found = client.ask(f"state({task!r})")
    assert (found["status"], found["return_value"]) == (status, value)
    assert found["exception_class_path"] == ("django_sqlsem.exceptions.AcquireTimeoutError" if not value else "") * (
        status == "FAILED"
    )
    assert notes(path) == []


def test_a_timeout_waits_in_the_worker_and_then_comes_back(client, path):
    with semaphore("patient").acquire():
        task = client.put("patient", path)
        assert client.ask("run_batch()") == 1
    client.ask("due()")
    with semaphore("patient").acquire() as permit:
        client.child.send("run_batch()")
        wait_until(lambda: semaphore("patient").status().waiting, what="the task to wait")
        permit.release()
        assert json.loads(client.child.expect()) == 0
    assert client.ask(f"last({task!r})")["value"] == "patient"


@pytest.mark.parametrize("name", ["outer", "inner"])
def test_two_semaphores_on_one_task(client, path, name):
    with semaphore(name).acquire():
        task = client.put("twice", path)
        assert client.ask("run_batch()") == 1
        assert notes(path) == []
    client.ask("due()")
    assert client.ask("run_batch()") == 0
    assert client.ask(f"last({task!r})")["value"] == "twice"


def test_a_body_that_calls_itself_makes_a_plain_call(client, path):
    with semaphore("again:0").acquire():
        task = client.put("calls_itself", path, 1)
        assert client.ask("impatient(run_batch)") == 0
    assert client.ask(f"state({task!r})")["exception_class_path"].endswith("AcquireTimeoutError")
    assert [line["depth"] for line in notes(path)] == [1]


def test_a_task_that_is_run_at_once_within_another(client, path):
    with semaphore("plain").acquire() as permit:
        task = client.put("nests", path)
        client.child.send("run_batch()")
        wait_until(lambda: semaphore("plain").status().waiting, what="the inner task to wait like a plain call")
        permit.release()
        assert json.loads(client.child.expect()) == 0
    assert client.ask(f"state({task!r})")["return_value"] == ["SUCCESSFUL", ""]
    assert [line["word"] for line in notes(path)] == ["within", "after"]
    assert notes(path)[1]["label"] == f"{APP}.nests[{task}]"


def test_a_block_within_a_task_is_labelled_with_it(client, path):
    task = client.put("undecorated", path)
    assert client.ask("run_batch()") == 0
    assert [line["label"] for line in notes(path)] == [f"{APP}.undecorated[{task}]"]


def test_calls_without_a_worker_are_plain(client, path):
    assert client.ask(f"plain.call({path!r}, 'direct')") == "direct"
    assert client.ask(f"plain.using(backend='immediate').enqueue({path!r}, 'at once').return_value") == "at once"
    assert client.ask(f"plain.using(backend='dummy').enqueue({path!r}).status") == "READY"
    assert [line["word"] for line in notes(path)] == ["direct", "at once"]
    assert [line["label"].partition("[")[0] == f"{APP}.plain" for line in notes(path)] == [False, True]
    with semaphore("plain").acquire():
        refused = f"plain.using(backend='immediate').enqueue({path!r}).errors[0].exception_class_path"
        assert client.ask(f"impatient(lambda: {refused})").endswith("AcquireTimeoutError")
    client.ask("lifecycle.stop_all()")


def test_a_task_that_runs_at_once_runs_under_its_callers_permit_of_the_same_name(client, path):
    ran = f"plain.using(backend='immediate').enqueue({path!r}, 'within').return_value"
    assert client.ask(f"[semaphore('plain').__enter__().slot, {ran}]") == [1, "within"]
    assert len(notes(path)) == 1
    client.ask("lifecycle.stop_all()")


def test_the_documentations_task(client):
    assert client.ask("exec(recipe('django.tasks import task'), globals()) or send_report.call('a')") is None
    client.ask("exec(recipe('contrib.tasks import latest'), globals())")
    with semaphore("plain").acquire():
        task = client.put("plain", "/dev/null")
        assert client.ask("run_batch()") == 1
        assert client.ask(f"report_is_sent(default_task_backend.get_result({task!r}))") is False
    client.ask("due()")
    assert client.ask("run_batch()") == 0
    assert client.ask(f"report_is_sent(default_task_backend.get_result({task!r}))") is True


def test_the_rank_goes_to_the_next_attempt(client, path):
    """Who was refused first goes before a waiter who came later, though the attempt has another id."""
    with semaphore("plain").acquire():
        first = client.put("plain", path, "first")
        assert client.ask("run_batch()") == 1
        assert [row[1] for row in _waiters()] == [True]
        before = _waiters()
        client.ask("due()")
        assert client.ask("run_batch()") == 1
        assert [row[2] for row in _waiters()] == [row[2] for row in before]  # it arrived when it first came
        assert [row[0] for row in _waiters()] != [row[0] for row in before]
    client.ask("due()")
    assert client.ask("run_batch()") == 0
    assert client.ask(f"last({first!r})")["value"] == "first"
    assert _waiters() == []


def _waiters():
    from django_sqlsem.models import WaiterRow

    return list(WaiterRow.objects.values_list("ticket", "away", "queued_us"))


def test_the_wrong_order_shows_the_right_one():
    from django_tasks import task

    made = task(notes)
    with pytest.raises(TypeError, match=r"@task\n    @semaphore\('r'\)\n    def notes\(\.\.\.\):"):
        semaphore("r")(made)
    with pytest.raises(TypeError, match=r"@task\n    @mutex\('r'\)"):
        mutex("r")(made)


def test_workers_keep_to_the_slots(database, settings, path):
    """Three workers on two slots: through a fan-out, a kill -9 of a holder, and SIGTERM."""
    settings.SQLSEM = {"DATABASE": database, "LEASE": 10}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(project(database))
        counter = stack.enter_context(OutsideCounter(database))
        workers = {each.pid: each for each in (stack.enter_context(child(database, "worker")) for _ in range(3))}
        for worker in workers.values():
            worker.expect("ready")
        parent = client.put("fan_out", 5, 0.2)
        wait_until(lambda: counter.entered == 5, timeout=120, what="all five to run")
        children = client.ask(f"state({parent!r})")["return_value"]
        wait_until(
            lambda: all(client.ask(f"last({each!r})")["value"] == "counted" for each in children),
            timeout=120,
            what="the latest attempt of each to be done",
        )
        assert (counter.peak, counter.current) == (2, 0)
        assert [client.ask(f"state({each!r})")["status"] for each in children] == ["SUCCESSFUL"] * 5

        client.put("stuck", path)
        wait_until(lambda: notes(path), timeout=60, what="one to be stuck")
        [stuck] = notes(path)
        workers.pop(stuck["pid"]).kill()
        later = [client.put("counted", 0.1) for _ in range(2)]
        wait_until(lambda: counter.entered == 7, timeout=120, what="the two to run")
        wait_until(lambda: not held_rows(database), timeout=60, what="the slot of the dead to come back")
        assert counter.peak == 2

        last = client.put("counted", 1.5)
        wait_until(lambda: counter.current, timeout=60, what="the last one to run")
        for worker in workers.values():
            worker.signal(signal.SIGTERM)
        for worker in workers.values():
            # Its handler raises SystemExit wherever it is, of which a driver may make an error, in a look at the queue.
            assert worker.wait(60) == 0 or ", in shutdown\n    sys.exit(0)" in worker.stderr, worker.stderr
        assert client.ask(f"last({last!r})")["value"] == "counted"
        assert {client.ask(f"last({each!r})")["value"] for each in later} == {"counted"}
        assert (counter.peak, counter.current) == (2, 0)


def test_tasks_whose_end_is_told_elsewhere_or_never_are_not_kept() -> None:
    @dataclasses.dataclass
    class Result:
        id: str

    def told() -> int:
        for number in range(100):
            result = Result(f"{number}")
            tasks._on_started(task_result=result)
            if number % 2:
                contextvars.copy_context().run(tasks._on_finished, task_result=result)
        return len(tasks._started.get())

    assert contextvars.Context().run(told) <= tasks.DEEPEST + 1


def test_what_is_enqueued_again_is_spread_and_never_for_longer_than_is_promised() -> None:
    laters = []

    def using(*, run_after, backend):
        laters.append((run_after - timezone.now()).total_seconds())
        return SimpleNamespace(enqueue=lambda *args: SimpleNamespace(id="2"))

    task = tasks.DjangoTask(SimpleNamespace(task=SimpleNamespace(using=using), args=[], kwargs={}, backend="x"), None)
    for _ in range(20):
        assert task.retry(10, ValueError()).task_id == "2"
    assert 4.9 <= min(laters) < max(laters) <= 15
    assert max(laters) - min(laters) > 0.1
    task.retry(4 * 3600, ValueError())
    assert MAX_COUNTDOWN - 1 < laters[-1] <= MAX_COUNTDOWN


@pytest.mark.parametrize(
    ("status", "value", "following"),
    [
        ("SUCCESSFUL", {SENT_AGAIN_AS: "2"}, "2"),
        ("SUCCESSFUL", {SENT_AGAIN_AS: "2", "more": 1}, ""),  # a task's own value
        ("SUCCESSFUL", [SENT_AGAIN_AS], ""),
        ("FAILED", None, ""),
    ],
)
def test_only_what_a_refused_attempt_returns_names_the_next(status, value, following) -> None:
    values = {} if status == "FAILED" else {"return_value": value}  # of others it cannot be asked
    assert tasks.sent_again_as(SimpleNamespace(status=status, **values)) == following
