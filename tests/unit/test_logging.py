"""Records of the log and signals: every record that concerns a name says so in a field, and signals tell seconds."""

from __future__ import annotations

import ast
import asyncio
import logging
import logging.config
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import django_sqlsem
from django_sqlsem import (
    control,
    mutex,
    semaphore,
    signals,
)
from django_sqlsem.exceptions import AcquireTimeoutError
from django_sqlsem.locks import counter
from django_sqlsem.runtime.loop import ThreadLoop
from django_sqlsem.snapshots import LossReason
from tests.support.databases import ROOT
from tests.support.threads import wait_until

pytestmark = pytest.mark.process_side

PACKAGE = Path(django_sqlsem.__file__).parent
LEVELS = ("debug", "info", "warning", "error", "exception", "log")
#: Records that concern a database, or something of the library's, and not one name. By their modules.
NAMELESS = {
    "backends/applock/possession.py": "A row of %r could not be ",
    "database/beacons.py": "",
    "backends/rows/handoff.py": "A slot was freed, and could not",
    "backends/rows/operator.py": "A holder could not be woken",
    "contrib/opentelemetry.py": "There are no figures",
    "control.py": "stored procedures",
    "runtime/chores.py": r"Permits |Nothing could be tidied up|%d idle names",
    "runtime/loop.py": "The keeper of %r met an error",
    "runtime/keepers.py": "The keeper of %r met an error",
    "runtime/presence.py": "",
    "database/errors.py": "The database %r is ",
    "database/transactions.py": "A callback ",
}
#: Their records are of several names, or of a database: their own pages say what is in them.
ELSEWHERE = ("admin/", "deadlocks/", "history/")


def calls() -> list[tuple[str, ast.Call, dict[str, str]]]:
    """Return every call that logs: its module, itself, and what its ``extra`` holds."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = str(path.relative_to(PACKAGE))
        if module.startswith(ELSEWHERE):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and getattr(node.func.value, "id", "") == "logger"
                ):
                    extra = next((ast.unparse(word.value) for word in node.keywords if word.arg == "extra"), "")
                    found.append((module, node, {"extra": extra, "function": ast.unparse(function)}))
    return found


def test_every_record_that_concerns_a_name_says_so() -> None:
    found = calls()
    assert len(found) > 25
    for module, node, told in found:
        text = ast.unparse(node)
        if told["extra"]:
            source = (PACKAGE / module).read_text(encoding="utf-8")
            assert re.search(r"""["']semaphore["']:""", told["extra"] + told["function"] + source), f"{module}: {text}"
        else:
            assert module in NAMELESS, f"{module}: {text}"
            assert re.search(NAMELESS[module], told["function"]), f"{module}: {text}"


def test_what_records_say_is_in_the_table() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name not in ("admin", "history")]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    sources = "".join(text for text in texts if "logger = " in text)
    said = set(re.findall(r'"what": "(\w+)"', sources)) | set(re.findall(r'_fields\([\w.]+, "(\w+)"', sources))
    page = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \| (?:DEBUG|INFO|WARNING|ERROR)", page, re.MULTILINE))
    assert said == listed


def test_the_documented_format_works_on_every_python(capsys: Any) -> None:
    page = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(LOGGING = .*?)```", page, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(block, namespace)
    logger = logging.getLogger("django_sqlsem")
    kept = (logger.handlers[:], logger.level, logger.propagate)
    try:
        celerys = logging.getLogger("celery.app.trace")
        logging.config.dictConfig(namespace["LOGGING"])
        assert not celerys.disabled
        logger.warning("of none")
        logger.warning("of one", extra={"what": "busy", "semaphore": "reports"})
        assert capsys.readouterr().err.splitlines() == ["WARNING - -: of none", "WARNING busy reports: of one"]
        assert not logger.propagate  # or the root's handlers, such as Celery's, would print it again
    finally:
        logger.handlers[:], _, logger.propagate = kept
        logger.setLevel(kept[1])


def fields(caplog: Any, what: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if getattr(record, "what", "") == what]


def test_the_fields_of_a_permits_life(database: str, caplog: Any) -> None:
    lock = semaphore("life", slots=2, using=database, timeout=0)
    with caplog.at_level(logging.DEBUG, "django_sqlsem"):
        with lock as permit:
            control.revoke("life", permit.slot, permit.token or 0, by="ann", using=database, kill=True)
            wait_until(lambda: permit.lost)
            wait_until(lambda: fields(caplog, "lost"))
        counter("some", 3, using=database).acquire(2)
    (granted,), (lost,), (acted,) = fields(caplog, "granted"), fields(caplog, "lost"), fields(caplog, "acted")
    assert (granted["semaphore"], granted["slots"], granted["waited"]) == ("life", permit.slots, 0)
    assert granted["token"] == permit.token
    assert (lost["semaphore"], lost["reason"], lost["levelname"]) == ("life", LossReason.REVOKED, "ERROR")
    assert lost["held"] > 0
    assert (acted["semaphore"], acted["action"], acted["by"]) == ("life", "revoke", "ann")
    (taken,) = fields(caplog, "counter_taken")
    assert (taken["semaphore"], taken["count"]) == ("some", 2)


def test_the_fields_of_a_busy_view(database: str, caplog: Any, rf: Any) -> None:
    @semaphore("full", using=database, timeout=0)
    def view(request: Any) -> None:
        raise AssertionError

    with mutex_held("full", database), caplog.at_level(logging.WARNING, "django_sqlsem"):
        assert run_elsewhere(lambda: view(rf.get("/full/"))).status_code == 503
    (record,) = fields(caplog, "busy")
    assert (record["semaphore"], record["holders"], record["waiting"]) == ("full", 1, 0)
    assert (record["status_code"], record["request"].path) == (503, "/full/")


def mutex_held(name: str, database: str) -> Any:
    return semaphore(name, using=database).acquire(timeout=20)


def run_elsewhere(work: Any) -> Any:
    """Run it in another thread, which holds nothing."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, "it has not ended, or has raised"
    return results[0]


class Heard(list[tuple[str, dict[str, Any]]]):
    """All signals about permits, as they come."""

    NAMES = ("permit_acquired", "permit_released", "permit_lost", "permit_forgotten", "acquire_timed_out")

    def __init__(self, *, inline: bool) -> None:
        super().__init__()
        self.inline = inline
        self.receivers: list[Any] = []

    def __enter__(self) -> Heard:
        for name in self.NAMES:

            def receive(_which: str = name, **kwargs: Any) -> None:
                kwargs.pop("permit", None)  # which would keep it from being forgotten
                self.append((_which, kwargs | {"thread": threading.current_thread()}))

            signal = getattr(signals, name)
            (signal.inline if self.inline else signal).connect(receive, weak=False)
            self.receivers.append((signal.inline if self.inline else signal, receive))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signal, receive in self.receivers:
            signal.disconnect(receive)

    def of(self, name: str) -> list[dict[str, Any]]:
        return [told for what, told in self if what == name]


@pytest.mark.parametrize("inline", [False, True], ids=["receivers", "inline"])
def test_signals_tell_seconds(database: str, inline: bool) -> None:
    lock = mutex("timed", using=database)
    with Heard(inline=inline) as heard, lock:
        time.sleep(0.05)
        with pytest.raises(AcquireTimeoutError):
            run_or_raise(lambda: lock.acquire(timeout=0.1))
    (acquired,), (released,), (refused,) = map(heard.of, ("permit_acquired", "permit_released", "acquire_timed_out"))
    assert acquired["waited"] == 0
    assert released["held"] >= 0.15
    assert refused["waited"] >= 0.1
    assert {each["semaphore"].name for each in (acquired, released, refused)} == {"timed"}


def run_or_raise(work: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    raise raised[0]


def test_inline_receivers_are_called_where_the_coroutine_runs(database: str) -> None:
    async def work() -> None:
        async with mutex("loop", using=database):
            pass

    with Heard(inline=True) as heard:
        asyncio.run(work())
    assert [name for name, _ in heard] == ["permit_acquired", "permit_released"]
    assert {told["thread"] for _, told in heard} == {threading.current_thread()}


def test_a_forgotten_permit_is_told_of_without_a_permit(database: str, caplog: Any) -> None:
    with Heard(inline=True) as heard:
        mutex("lost property", using=database).acquire()
        (told,) = wait_until(lambda: heard.of("permit_forgotten"))
    assert (told["name"], told["using"], told["loss"].reason) == ("lost property", database, LossReason.FORGOTTEN)
    (record,) = fields(caplog, "forgotten")
    assert (record["semaphore"], record["reason"]) == ("lost property", LossReason.FORGOTTEN)


def test_a_decorators_name_is_known_to_receivers(database: str) -> None:
    @semaphore("sync:{user}", using=database)
    def sync(user: int) -> None:
        pass

    with Heard(inline=True) as heard:
        sync(7)
        sync(8)
    assert [told["semaphore"].name for told in heard.of("permit_acquired")] == ["sync:7", "sync:8"]
    assert {told["semaphore"].template for _, told in heard} == {"sync:{user}"}


def test_a_failing_receiver_does_not_disturb(database: str) -> None:
    def fail(**kwargs: Any) -> None:
        raise RuntimeError("from a receiver")

    signals.permit_acquired.inline.connect(fail)
    signals.permit_released.connect(fail)
    try:
        with mutex("quiet", using=database) as permit:
            assert permit.slot == 1
    finally:
        assert signals.permit_acquired.inline.disconnect(fail)
        assert signals.permit_released.disconnect(fail)
    assert not signals.permit_acquired.heard


class Failing:
    """Duties of a keeper whose turns fail with one error after the other."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = iter(errors)
        self.turns = 0
        self.done = False

    def __getattr__(self, name: str) -> Any:
        return lambda: None

    def descriptors(self) -> list[int]:
        return []

    def pause(self) -> float:
        return 0.0

    def has_work(self) -> bool:
        return not self.done

    def take_turn(self) -> None:
        self.turns += 1
        error = next(self.errors, "")
        if not error:
            self.done = True
        else:
            raise ValueError(error)


def test_an_error_that_a_keeper_meets_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    duties = Failing(["a"] * 6 + ["b"] * 3)
    loop = ThreadLoop("default", duties)
    loop.ensure()
    wait_until(lambda: not loop.runs())
    assert duties.turns == 10
    told = [record for record in caplog.records if "met an error and goes on" in record.getMessage()]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["a", "b"]
    loop.after_fork()  # lets go of its sockets
