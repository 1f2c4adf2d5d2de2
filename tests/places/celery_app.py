"""The Celery project whose workers the tests start: decorated tasks of every kind that people write.

``celery --app tests.places.celery_app worker …`` runs it, configured by ``SQLSEM_PLACES_CELERY``. Every task gets the
path of a file, to which it adds a line for all that happens to it, and the name of the semaphore that it takes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from celery import Celery, Task, signals
from celery.exceptions import SoftTimeLimitExceeded

from django_sqlsem import semaphore
from django_sqlsem.core import identity

app = Celery("sqlsem-places")
app.conf.update(json.loads(os.environ.get("SQLSEM_PLACES_CELERY", "{}")))


def note(path: str, what: str, **more: Any) -> None:
    """Add a line to a file: one write in append mode, so that the order of the lines is that of events."""
    line = {"what": what, "pid": os.getpid(), "thread": threading.get_ident(), "at": time.time(), **more}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@signals.task_retry.connect
def note_retry(sender: Any, request: Any, reason: Any, **kwargs: Any) -> None:
    paths = [each for each in request.args if str(each).startswith("/")]
    if paths:
        note(paths[0], "retry", task=sender.name, id=request.id, retries=request.retries, reason=str(reason))


def stay(path: str, word: str, seconds: float) -> None:
    """Be inside, and let the file know."""
    task = app.current_worker_task
    label, retries = identity.current().label, task.request.retries if task else None
    note(path, "begin", word=word, label=label, retries=retries)
    if seconds:
        time.sleep(seconds)
    note(path, "end", word=word)


@app.task(name="p.work", max_retries=0)
@semaphore("{name}")
def work(path: str, name: str, word: str = "work", seconds: float = 0) -> str:
    stay(path, word, seconds)
    return word


@app.task(name="p.two", max_retries=None)
@semaphore("{name}", slots=2)
def two(path: str, name: str, word: str = "two", seconds: float = 0) -> str:
    stay(path, word, seconds)
    return word


@app.task(name="p.late", acks_late=True, reject_on_worker_lost=True)
@semaphore("{name}")
def late(path: str, name: str, word: str = "late", seconds: float = 0) -> str:
    """Takes its time at the first attempt."""
    again = os.path.exists(f"{path}-{word}")
    open(f"{path}-{word}", "w").close()
    stay(path, word, 0 if again else seconds)
    return word


@app.task(name="p.patient")
@semaphore("{name}", timeout=60)
def patient(path: str, name: str, word: str = "patient", seconds: float = 0) -> str:
    stay(path, word, seconds)
    return word


@app.task(name="p.ranked")
@semaphore("{name}", timeout=4)
def ranked(path: str, name: str, word: str = "ranked") -> str:
    stay(path, word, 0)
    return word


@app.task(name="p.ranked_late", acks_late=True)
@semaphore("{name}", timeout=4)
def ranked_late(path: str, name: str, word: str = "ranked_late") -> str:
    stay(path, word, 0)
    return word


@app.task(name="p.outer")
def outer(path: str, name: str, seconds: float) -> str:
    """Catches its soft time limit around a decorated function that waits."""
    inner = semaphore(name, timeout=seconds)(lambda: note(path, "begin", word="outer"))
    note(path, "waits")
    try:
        inner()
    except SoftTimeLimitExceeded:
        note(path, "soft")
        return "soft"
    return "none"


@app.task(name="p.about", bind=True, max_retries=1)
@semaphore("{name}")
def about(self: Any, path: str, name: str, **_: Any) -> dict[str, Any]:
    """Say what the message was like."""
    request = self.request
    headers = {key: value for key, value in (request.headers or {}).items() if key.startswith("x-sqlsem")}
    delivery = {key: request.delivery_info.get(key) for key in ("exchange", "routing_key", "priority")}
    return {
        "id": request.id,
        "retries": request.retries,
        "max_retries": self.max_retries,
        "override": getattr(self, "override_max_retries", "none"),
        "headers": headers,
        "delivery": delivery,
        "shadow": request.shadow,
        "expires": bool(request.expires),
        "timelimit": request.timelimit,
        "ignore_result": request.ignore_result,
        "root_id": request.root_id,
        "stamps": request.stamps or None,
    }


@app.task(
    name="p.auto",
    bind=True,
    autoretry_for=(Exception,),
    dont_autoretry_for=(KeyError,),
    retry_backoff=1,
    retry_backoff_max=1,
    retry_jitter=False,
    retry_kwargs={"max_retries": 1},
)
@semaphore("{name}")
def auto(self: Any, path: str, name: str, error: str = "value") -> list[int]:
    note(path, "begin", word="auto", retries=self.request.retries)
    if error == "key":
        raise KeyError("not retried")
    if self.request.retries == 0:
        raise ValueError("once")
    return [self.request.retries, self.max_retries]


@app.task(name="p.auto_raise", autoretry_for=(Exception,), max_retries=0)
@semaphore("{name}", on_busy="raise")
def auto_raise(path: str, name: str) -> None:
    note(path, "begin", word="auto_raise")


@app.task(name="p.own", bind=True, max_retries=1, default_retry_delay=0)
@semaphore("{name}")
def own(self: Any, path: str, name: str) -> int:
    """Retries by itself, with a limit of its own."""
    note(path, "begin", word="own", retries=self.request.retries)
    if self.request.retries < 4:
        raise self.retry(countdown=0, max_retries=9)
    return self.request.retries


class Calling(Task):
    """A base class as projects have it: it does something around each call."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(args[0], "call")
        return super().__call__(*args, **kwargs)

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(args[0], "on_retry", error=type(exc).__name__, retries=self.request.retries)


@app.task(name="p.called", base=Calling, max_retries=None)
@semaphore("{name}")
def called(path: str, name: str) -> str:
    note(path, "begin", word="called")
    return "called"


@app.task(name="p.skipped")
@semaphore("{name}", on_busy="skip")
def skipped(path: str, name: str) -> str:
    return "ran"


@app.task(name="p.replaced", bind=True)
@semaphore("{name}")
def replaced(self: Any, path: str, name: str) -> None:
    note(path, "begin", word="replaced")
    raise self.replace(work.si(path, name, "in its place"))


@app.task(name="p.add")
def add(*numbers: Any) -> list[Any]:
    return [each for number in numbers for each in (number if isinstance(number, list) else [number])]


@app.task(name="p.join")
@semaphore("{name}")
def join(results: Any, path: str, name: str) -> Any:
    """The end of a chord or chain, itself decorated."""
    note(path, "begin", word="join")
    return results


@app.task(name="p.failed")
def failed(request: Any, error: Any, traceback: Any, path: str) -> None:
    note(path, "errback", error=type(error).__name__)


@app.task(name="p.note")
def linked(result: Any, path: str) -> None:
    note(path, "link", result=result)


@app.task(name="p.storm")
def storm(path: str, name: str, seconds: float) -> None:
    """Take and give back while somebody sends the signal of soft time limits."""
    ends = time.monotonic() + seconds
    body = semaphore(name, timeout=5)(lambda: None)
    note(path, "storm")
    while time.monotonic() < ends:
        try:
            body()
        except SoftTimeLimitExceeded:
            note(path, "struck")


@app.task(name="p.spin")
@semaphore("{name}")
def spin(path: str, name: str, seconds: float) -> str:
    """Keep the processor to itself, without a pause in which another greenlet could run."""
    note(path, "begin", word="spin")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(1000))
    note(path, "end", word="spin")
    return "spun"


@app.task(name="p.pid")
def pid() -> int:
    return os.getpid()


if name := os.environ.get("SQLSEM_PLACES_PARENT"):

    @signals.worker_init.connect
    def use_one(**kwargs: Any) -> None:
        """Take a semaphore in the process that the pool will be forked from, and keep it."""
        use_one.permit = semaphore(name).acquire()  # type: ignore[attr-defined]
        use_one.permit.detach()  # type: ignore[attr-defined]
        with semaphore(f"{name}-used"):
            pass
