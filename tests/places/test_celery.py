from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import time
import uuid
from types import SimpleNamespace

import pytest
from celery import Celery, Task, shared_task, signals
from celery._state import _task_stack
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject, SoftTimeLimitExceeded
from django.http import HttpResponse
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from django_sqlsem import (
    AcquireTimeoutError,
    AlreadyHeldError,
    BackendError,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.contrib import celery as contrib
from django_sqlsem.contrib.celery import MAX_COUNTDOWN, MIN_COUNTDOWN
from django_sqlsem.decorators.tasks import hand_on, is_below, step_aside
from django_sqlsem.testing import busy, held
from tests.programs import celery_app
from tests.programs.celery_app import app, notes
from tests.support.databases import assert_nothing_held, held_rows
from tests.support.processes import Child
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "notes")


@pytest.fixture(scope="module")
def worker_thread():
    """A worker in a thread of this process."""
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20, loglevel="WARNING"):
        yield


@pytest.fixture
def worker(worker_thread, database, settings):
    """A worker whose tasks keep their locks in ``database``."""
    settings.SQLSEM = {"DATABASE": database}


@pytest.fixture
def retries():
    """The reasons of all retries, as Celery's signal tells them, with the request's number of retries."""
    seen = []

    def note(sender, request, reason, **kwargs):
        seen.append((reason, request.retries))

    signals.task_retry.connect(note)
    yield seen
    signals.task_retry.disconnect(note)


@pytest.mark.process_side("postgres")
def test_a_busy_task_comes_back_and_spends_no_retries(worker, database, path, retries, caplog):
    with held("tasks", total=1), caplog.at_level(logging.INFO):
        result = celery_app.plain.delay(path)
        wait_until(lambda: len(retries) >= 2, what="two retries")
        assert notes(path) == []
    assert result.get(timeout=20) == "plain"
    assert len(notes(path)) == 1
    assert celery_app.plain.max_retries == 0
    for reason, counted in retries:
        assert counted == 0
        assert MIN_COUNTDOWN <= reason.when <= MAX_COUNTDOWN
        assert isinstance(reason.exc, AcquireTimeoutError)
    assert len({reason.when for reason, _ in retries}) > 1
    told = [r for r in caplog.records if r.name == "django_sqlsem" and getattr(r, "what", "") == "busy"]
    assert len(told) == len(retries)
    assert {record.levelno for record in told} == {logging.INFO}  # it is what it was designed for
    assert f"Busy: tests.plain[{result.id}] is sent again for later, because no slot of 'tasks'" in caplog.text


def test_the_holder_is_labelled_with_the_task(worker, path):
    result = celery_app.plain.delay(path)
    result.get(timeout=20)
    assert [line["label"] for line in notes(path)] == [f"tests.plain[{result.id}]"]


def test_a_bound_task_with_a_template(worker, path, retries):
    with held("tasks:word", total=1):
        result = celery_app.bound.delay(path, word="word")
        wait_until(lambda: retries, what="a retry")
    assert result.get(timeout=20) == "word"
    assert [(line["word"], line["retries"]) for line in notes(path)] == [("word", 0)]


def test_the_task_s_own_retries_are_counted_as_ever(worker, path, retries):
    with held("tasks", total=1):
        result = celery_app.persistent.delay(path)
        wait_until(lambda: len(retries) >= 2, what="two retries")
    assert result.get(timeout=20) == 1
    assert [line["retries"] for line in notes(path)] == [0, 1]


def test_shared_tasks_and_tasks_that_are_classes(worker, path, retries):
    with held("tasks", total=1):
        results = [app.tasks["tests.shared"].delay(path), celery_app.class_based.delay(path)]
        wait_until(lambda: len({reason.sig.task for reason, _ in retries}) == 2, what="a retry of each")
    for result in results:
        result.get(timeout=20)
    assert sorted(line["word"] for line in notes(path)) == ["class", "shared"]


def test_a_body_that_runs_itself_makes_a_plain_call(worker, path, retries):
    """If that is busy, the task is not sent again from its middle."""
    with held("tasks:b", total=1), held("tasks:c", total=1):
        result = celery_app.parts.delay(path, "a", ["b"])
        with pytest.raises(AcquireTimeoutError):
            result.get(timeout=20)
        assert retries == []
        again = celery_app.parts.delay(path, "c")
        wait_until(lambda: retries, what="a retry")
    again.get(timeout=20)
    assert [line["word"] for line in notes(path)] == ["a", "c"]


def test_a_task_that_is_sent_only_once_comes_back(worker, path, retries):
    with held("tasks", total=1):
        result = celery_app.once.delay(path)
        wait_until(lambda: len(retries) >= 2, what="two retries")
    assert result.get(timeout=20) == "once"


@pytest.mark.django_db
def test_an_asynchronous_on_busy_is_told(path):
    async def later(about): ...

    @semaphore("tasks", on_busy=later)
    def work(): ...

    with busy("tasks"), pytest.raises(TypeError, match=r"on_busy .*later.* is asynchronous, but .*work is not"):
        work()


def test_raise_fails_the_task(worker, path, retries):
    with held("tasks", total=1):
        result = celery_app.strict.delay(path)
        with pytest.raises(AcquireTimeoutError):
            result.get(timeout=20)
    assert (notes(path), retries) == ([], [])


def test_skip_ends_the_task_without_a_result(worker, path, retries):
    with held("tasks", total=1):
        assert celery_app.skipped.delay(path).get(timeout=20) is None
    assert (notes(path), retries) == ([], [])
    assert celery_app.skipped.delay(path).get(timeout=20) == "ran"


def test_a_timeout_waits_in_the_worker(worker, path, retries):
    with held("tasks", total=1) as [permit]:
        result = celery_app.patient.delay(path)
        time.sleep(0.3)
        permit.release()
        assert result.get(timeout=20) == "patient"
    assert retries == []


def test_a_task_that_another_calls_is_a_plain_call(worker, path, retries):
    assert celery_app.calls.delay(path).get(timeout=20) == "called"
    with busy("tasks"), pytest.raises(AcquireTimeoutError):
        celery_app.calls.delay(path).get(timeout=20)
    assert retries == []


# Without a worker.


@pytest.mark.django_db
def test_eager_and_direct_calls_wait_and_then_raise(settings, path):
    settings.SQLSEM = {"TIMEOUT": 0.3}
    for call in (lambda: celery_app.plain(path), lambda: celery_app.plain.apply((path,), throw=True)):
        with held("tasks", total=1):
            start = time.monotonic()
            with pytest.raises(AcquireTimeoutError):
                call()
            assert 0.3 <= time.monotonic() - start < 10  # a plain call would wait for 30 s, a task not at all
        call()
    assert len(notes(path)) == 2


@pytest.mark.django_db
def test_a_task_that_is_always_eager(path):
    app.conf.task_always_eager = True
    try:
        assert celery_app.plain.delay(path).get() == "plain"
        assert celery_app.bound.delay(path, word="x").get() == "x"
    finally:
        app.conf.task_always_eager = False


@pytest.mark.django_db
def test_an_eager_task_runs_under_its_callers_permit_of_the_same_name(path):
    app.conf.task_always_eager = app.conf.task_eager_propagates = True
    try:
        with semaphore("tasks", 1) as permit:
            assert celery_app.plain.delay(path).get() == "plain"
            assert celery_app.plain.apply((path,), throw=True).get() == "plain"
            assert queries.semaphore("tasks").held == 1
            assert permit.lost is None
            with pytest.raises(AlreadyHeldError):
                celery_app.plain(path)  # a call like any other
        assert queries.semaphore("tasks").held == 0
        assert celery_app.plain.delay(path).get() == "plain"  # by itself it takes one of its own
    finally:
        app.conf.task_always_eager = app.conf.task_eager_propagates = False


@pytest.mark.django_db
def test_a_view_and_its_eager_task_share_a_name(path, rf):
    @semaphore("tasks", 1)
    def view(request):
        return HttpResponse(celery_app.plain.delay(path).get())

    app.conf.task_always_eager = app.conf.task_eager_propagates = True
    try:
        assert view(rf.get("/")).content == b"plain"
    finally:
        app.conf.task_always_eager = app.conf.task_eager_propagates = False
    assert [line["label"] for line in notes(path)] == ["GET /"]  # whose permit it is


@pytest.mark.django_db
def test_a_body_that_calls_itself_does_not_deadlock(path):
    local = Celery("local", set_as_current=False)

    @local.task(name="recursive")
    @semaphore("recursive")
    def recursive(depth):
        return recursive(depth - 1) if depth else 0

    assert recursive(0) == 0
    with pytest.raises(AlreadyHeldError):
        recursive(1)


def test_the_arguments_of_a_task_are_still_checked(path):
    with pytest.raises(TypeError):
        celery_app.plain.delay()
    with pytest.raises(TypeError):
        celery_app.bound.delay(path, word="x", other=1)


def test_decorating_a_task_shows_the_right_order():
    local = Celery("local", set_as_current=False)

    def report(): ...

    order = r"@app\.task\n    @semaphore\('r'\)\n    def report\(\.\.\.\):"
    for task in (local.task(report), local.task(name="x.report")(report), local.tasks["x.report"]):
        with pytest.raises(TypeError, match=order):
            semaphore("r")(task)
    with pytest.raises(TypeError, match=r"not the task report\. (.|\n)*" + order):
        semaphore("r")(shared_task(report))
    with pytest.raises(TypeError, match=r"@app\.task\n    @mutex\('r'\)"):
        mutex("r")(local.tasks["x.report"])
    with pytest.raises(TypeError, match=r"@semaphore\('r'\)\n    def run\(self"):
        semaphore("r")(celery_app.Worker)


def test_a_lazy_task_is_refused_without_being_made():
    local = Celery("local", set_as_current=False, autofinalize=False)

    with pytest.raises(TypeError, match="Put it below the task's decorator"):

        @semaphore("r")
        @local.task
        def unmade(): ...

    assert "unmade" not in str(local._tasks.keys())


def test_the_countdown_is_never_longer_than_brokers_allow(worker, path, retries):
    from django_sqlsem.snapshots import retry_after

    with held("tasks", total=1):
        assert retry_after(semaphore("tasks").status()) * 1.5 <= MAX_COUNTDOWN


@contextlib.contextmanager
def run(task, **request):
    """As it is while a worker runs a task, or something runs it at once."""
    _task_stack.push(task)
    task.push_request(**{"id": "1", "called_directly": False, "is_eager": False} | request)
    try:
        yield
    finally:
        task.pop_request()
        _task_stack.pop()


def test_only_a_task_s_own_body_is_put_off_or_runs_under_its_callers_permit():
    @semaphore("tasks")
    def helper(): ...

    body = celery_app.plain.run
    with run(celery_app.plain):
        assert contrib.running(body, ()).id == "1"
        assert contrib.running(helper, ()) is None
        assert not contrib.runs_at_once(body, ())
    with run(celery_app.plain, is_eager=True):
        assert contrib.running(body, ()) is None
        assert contrib.runs_at_once(body, ())
        assert not contrib.runs_at_once(helper, ())
    with run(celery_app.plain, is_eager=True, called_directly=True):
        assert not contrib.runs_at_once(body, ())


def silent(function):
    """A decorator that does not say what it wraps."""
    return lambda: function()


def test_a_body_is_found_below_other_decorators():
    @semaphore("tasks")
    def body(): ...

    @functools.wraps(body)
    def wrapper(): ...

    class Holder:
        method = body

    around = (body, wrapper, silent(body), silent(wrapper), functools.partial(wrapper, 1), Holder().method)
    assert [is_below(body, each) for each in around] == [True] * 6
    assert not is_below(body, functools.partial(print), None, len)


def test_countdowns_are_spread_and_no_longer_or_shorter_than_brokers_allow(monkeypatch):
    monkeypatch.setattr(Task, "apply_async", lambda *args, **options: None)
    with run(celery_app.plain):
        whens = [contrib.retry(celery_app.plain, 10, ValueError()).when for _ in range(20)]
        short = [contrib.retry(celery_app.plain, 1, ValueError()).when for _ in range(20)]
        assert contrib.retry(celery_app.plain, 4 * 3600, ValueError()).when == MAX_COUNTDOWN
    assert 5 <= min(whens) < max(whens) <= 15
    assert 1 <= min(short) < max(short) <= 1.5  # a quorum queue has no delay of 0 whole seconds


def test_what_the_sender_has_hidden_from_logs_stays_hidden(monkeypatch):
    sent = []
    monkeypatch.setattr(Task, "apply_async", lambda *args, **options: sent.append(options))
    with run(celery_app.plain, argsrepr="<hidden>", kwargsrepr="{'password': '***'}"):
        contrib.retry(celery_app.plain, 1, ValueError())
    with run(celery_app.plain):
        contrib.retry(celery_app.plain, 1, ValueError())
    assert [sent[0][name] for name in ("argsrepr", "kwargsrepr")] == ["<hidden>", "{'password': '***'}"]
    assert not {"argsrepr", "kwargsrepr"} & sent[1].keys()


def test_a_soft_time_limit_while_it_is_sent_again_is_one(monkeypatch):
    def strike(*args, **options):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(Task, "apply_async", strike)
    for task in (celery_app.plain, celery_app.late):
        with run(task), pytest.raises(SoftTimeLimitExceeded):
            contrib.retry(task, 1, ValueError())


@pytest.mark.django_db
def test_a_message_that_is_given_back_is_no_failure_to_autoretry(monkeypatch, path):
    """Its worker's parent process gets the exception as bytes."""

    def refuse(*args, **options):
        raise OSError("refused")

    monkeypatch.setattr(Task, "apply_async", refuse)
    monkeypatch.setattr(contrib, "PAUSE_BEFORE_REJECT", 0.0)
    with busy("tasks"), run(celery_app.late, args=(path,), kwargs={}), pytest.raises(Reject) as caught:
        celery_app.late.run(path)
    assert caught.value.requeue
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - its own
    assert (type(copy), copy.requeue) == (contrib.GivenBack, True)
    assert not hasattr(contrib, "Other")


def test_a_message_that_every_worker_gets_is_not_sent_again():
    local = Celery("local", set_as_current=False)
    local.conf.task_queues = (Broadcast("everybody"), Queue("one"))

    @local.task(name="told")
    @semaphore("tasks")
    def told(): ...

    for exchange, put_off in (("everybody", False), ("one", True), ("", True), (None, True)):
        with run(told, delivery_info={"exchange": exchange}):
            assert (contrib.running(told.run, ()) is not None) == put_off, exchange


def test_a_helper_that_is_an_argument_s_default_is_no_body():
    """The task would be sent again in the middle of its work."""
    local = Celery("local", set_as_current=False)
    body = celery_app.plain.run  # it comes from another module

    @local.task(name="helped")
    def helped(path, helper=body, *, other=body): ...

    @local.task(name="decorated")
    def decorated(*args, function=body): ...

    for task, found in ((helped, False), (decorated, True)):
        with run(task):
            assert (contrib.running(body, ()) is not None) == found


def test_a_message_that_several_queues_get_is_not_sent_again():
    local = Celery("local", set_as_current=False)
    news, topics, direct = Exchange("news", type="fanout"), Exchange("topics", type="topic"), Exchange("direct")
    local.conf.task_queues = (
        Queue("bound", bindings=[binding(news)]),
        Queue("all", topics, routing_key="orders.#"),
        Queue("new", topics, routing_key="orders.*.new"),
        Queue("mail", bindings=[binding(topics, "mail.#"), binding(topics, "mail.x")]),
        Queue("one", direct, routing_key="one"),
        Queue("two", direct, routing_key="two"),
        Queue("second", direct, routing_key="two"),
    )

    @local.task(name="told of several queues")
    @semaphore("tasks")
    def told(): ...

    for exchange, key, put_off in (
        ("news", "", False),
        ("topics", "orders.eu.new", False),
        ("topics", "orders.new", True),
        ("topics", "orders", True),
        ("topics", "mail.x", True),  # one queue gets it once
        ("direct", "one", True),
        ("direct", "two", False),
        ("direct", None, True),
        ("other", "two", True),
    ):
        with run(told, delivery_info={"exchange": exchange, "routing_key": key}):
            assert (contrib.running(told.run, ()) is not None) == put_off, (exchange, key)


def test_a_rank_that_cannot_be_kept_or_handed_on_fails_no_task():
    def fail(*args):
        raise BackendError("away")

    lock = SimpleNamespace(name="tasks", _step_aside=fail, _hand_rank_on=fail)
    refusal = SimpleNamespace(_snapshot=SimpleNamespace(name="tasks", holders=()), retry_after=7)
    task = SimpleNamespace(id="1", label="tests.plain[1]")
    assert step_aside(lock, task, refusal) == 7
    hand_on(lock, task, "2")


# Workers in processes of their own.


@pytest.fixture(params=["filesystem", "redis"])
def broker(request, tmp_path):
    if request.param == "filesystem":
        return str(tmp_path)
    return f"{request.getfixturevalue('redis_url').rpartition('/')[0]}/5"


@pytest.fixture
def send(database, settings, broker):
    """A function that sends a task to a worker with two processes."""
    settings.SQLSEM = {"DATABASE": database, "LEASE": 10}
    queue = f"sqlsem-tests-{uuid.uuid4().hex}"  # of our own: the server is shared
    options = ["--concurrency=2", "--pool=prefork", f"--queues={queue}"]
    with Child("tests.programs.celery_app:work", broker, *options) as child:
        found = celery_app.broker_settings(broker)
        options = found.get("broker_transport_options")
        with app.connection_for_write(url=found["broker_url"], transport_options=options) as connection:
            yield functools.partial(celery_app.slow.apply_async, queue=queue, connection=connection)
        child.process.terminate()
        child.process.wait(30)


@pytest.mark.process_side("postgres")
def test_a_prefork_worker_serves_one_at_a_time(send, database, path):
    for _ in range(3):
        send((path, 0.5))
    wait_until(lambda: len(notes(path)) == 6, timeout=60, what="three tasks done")
    assert [line["word"] for line in notes(path)] == ["slow begins", "slow ends"] * 3
    assert_nothing_held(database)


@pytest.mark.process_side("postgres")
def test_a_soft_time_limit_gives_the_slot_back(send, database, path):
    send((path, 30), soft_time_limit=1)
    wait_until(lambda: notes(path), timeout=60, what="the task to begin")
    wait_until(lambda: not held_rows(database), timeout=15, what="the slot to be free")
    assert [line["word"] for line in notes(path)] == ["slow begins"]
