"""A process with many waiters that is told when to ask, and can be held up between its statements."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

from django.db import connections

from django_sqlsem import AcquireTimeoutError, PermitLostError, semaphore
from django_sqlsem.backends import get_backend
from django_sqlsem.backends.applock import line
from django_sqlsem.backends.rows import statements
from django_sqlsem.core.clocks import boot_now
from django_sqlsem.database import cursors
from django_sqlsem.runtime import queue as runtime_queue
from django_sqlsem.runtime.keeper import Keeper
from django_sqlsem.runtime.keepers import keeper_for
from django_sqlsem.runtime.presence import Reach
from tests.programs.contenders import SharedCounter
from tests.support import applocks
from tests.support.children import listen, say
from tests.support.processes import Child
from tests.support.threads import wait_until


class Gates:
    """Holds up the first statement that contains a text, before or after it, until it is opened. Keeps all texts."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self._texts: dict[str, tuple[str, str]] = {}
        self._opened: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        for kind in (cursors.Cursor, *cursors.Cursor.__subclasses__()):
            if "execute" in vars(kind):
                self._guard(kind)
        applocks.note_statements(self.statements.append)

    def put_up(self, when: str, text: str, name: str = "") -> None:
        """Hold up the next statement with this text; gates that are up at the same time have names."""
        self._texts[name or when] = (when, text)
        self._opened[name or when] = threading.Event()

    def open(self, name: str) -> None:
        """Let the statement go on."""
        self._opened[name].set()

    def _guard(self, kind: type[cursors.Cursor]) -> None:
        real = kind.execute

        def execute(cursor: Any, sql: str, parameters: Any = None) -> None:
            self.statements.append(sql)
            self._pass("before", sql)
            real(cursor, sql, parameters)
            if cursor.db.vendor != "sqlite":
                self._pass("after", sql)
                return
            close = cursor.close  # SQLite ends a statement only when it has been read to its end

            def close_and_pass() -> None:
                close()
                self._pass("after", sql)

            cursor.close = close_and_pass

        kind.execute = execute  # type: ignore[method-assign]

    def before_joining(self) -> None:
        """Hold up the next thread whose place the database knows and the process does not."""
        self.put_up("joining", "")
        join = Keeper._join

        def pass_and_join(*args: Any) -> None:
            self._pass("joining", "")
            join(*args)

        Keeper._join = pass_and_join  # type: ignore[method-assign]

    def _pass(self, when: str, sql: str) -> None:
        with self._lock:
            up = [name for name, (side, text) in self._texts.items() if side == when and text in sql][:1]
            for name in up:
                del self._texts[name]
        for name in up:
            opened = self._opened[name]
            say("gate reached")
            assert opened.wait(60)


class Queue:
    """The child's side: one thread for each that asks, known by a word of the parent's."""

    def __init__(self, alias: str, name: str, options: dict[str, Any], *, counted: bool) -> None:
        self.alias, self.name, self.options = alias, name, options
        self.orders: dict[str, queue.SimpleQueue[str]] = {}
        self.counter = SharedCounter(alias) if counted else None
        self.gates = Gates()
        self.records: list[list[str]] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.records.append([record.levelname, record.getMessage()])  # type: ignore[method-assign]
        logging.getLogger("django_sqlsem").addHandler(handler)
        logging.getLogger("django_sqlsem").setLevel(logging.INFO)
        self.keeper: Any = keeper_for(get_backend(alias))

    def acquire(self, who: str, options: dict[str, Any]) -> None:
        """Have a new thread ask, and return."""
        self.orders[who] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(who, options), name=who, daemon=True).start()

    def _run(self, who: str, options: dict[str, Any]) -> None:
        timeout = options.pop("timeout", 60)
        name = options.pop("name", self.name)
        started = time.monotonic()
        try:
            permit = semaphore(name, using=self.alias, **self.options, **options).acquire(timeout=timeout)
        except AcquireTimeoutError:
            return say(f"{who} busy {time.monotonic() - started}")
        except BaseException as error:
            return say(f"{who} failed {json.dumps(repr(error))}")
        counted = [self.counter for _ in permit.slots if self.counter is not None and name == self.name]
        for counter in counted:
            counter.enter()
        told = {"slots": permit.slots, "tokens": permit.tokens, "waited": permit.waited, "at": time.monotonic()}
        say(f"{who} held {json.dumps(told)}")
        while (order := self.orders[who].get()) != "release":
            assert order == "check", order
            try:
                permit.check()
                say(f"{who} checked {json.dumps('ours')}")
            except PermitLostError as error:
                say(f"{who} checked {json.dumps(str(error))}")
        for counter in counted:
            counter.leave()
        permit.release()
        say(f"{who} released {time.monotonic()}")

    # What the parent may ask for by name.

    def warm(self) -> None:
        """Be a process that has been running for a while: it can be reached, and shows that it lives."""
        with semaphore(f"{self.name}-warm-{os.getpid()}", using=self.alias):
            wait_until(
                lambda: self.keeper.own.is_open and (self.keeper.reach.presence.near or applocks.are_at(self.alias))
            )

    def tepid(self) -> None:
        """The same where nobody can reach it."""
        with semaphore(f"{self.name}-warm-{os.getpid()}", using=self.alias):
            wait_until(lambda: self.keeper.own.is_open)

    def deaf(self) -> None:
        """Hear nothing of what is granted."""
        heard = Reach.heard
        Reach.heard = lambda reach: heard(reach) and []  # type: ignore[method-assign]

    def unhurried(self) -> None:
        """Never look around by itself once it waits."""
        runtime_queue.HEARTBEAT = 1000.0  # type: ignore[misc]
        line.SHOWN_AFTER = line.SHOWN_ANYHOW = 0.0  # type: ignore[misc]  # else its row would be written when it looks around
        statements.PATIENCE_US = 1_000_000_000  # type: ignore[misc]

    def asleep(self) -> None:
        """Wait until nothing but a word from elsewhere will wake the waiters."""
        due = 5.0 if runtime_queue.HEARTBEAT > 5 else 0.2

        def asleep() -> bool:
            queues = self.queues()  # none yet, where the row is there and the process has not noticed
            return bool(queues) and all(each.enrolled and each.next_at > boot_now() + due for each in queues)

        wait_until(asleep)

    def queued(self, count: int) -> None:
        """Wait until so many threads wait."""
        wait_until(lambda: sum(len(each.waiting) for each in self.queues()) == count)

    def order(self) -> list[str]:
        """The threads that wait, in order."""
        return [hold.request.holder.thread for each in self.queues() for hold in each.waiting]

    def queues(self) -> list[Any]:
        """The queues of all names."""
        return list(self.keeper.queues.values())

    def statements(self) -> list[str]:
        """All statements so far."""
        return list(self.gates.statements)

    def session(self) -> int:
        """The server's number of the keeper's session; 0 where there is none."""
        found = self.keeper.own.connection if self.keeper.own.is_open else None
        if found is None or found.connection is None or found.vendor == "sqlite":
            return 0
        return int(found.connection.info.backend_pid if found.vendor == "postgresql" else found.connection.thread_id())

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        return time.process_time()

    def log(self) -> list[list[str]]:
        """What was logged."""
        return self.records


def obey(alias: str, name: str, options: dict[str, Any], counted: bool) -> None:
    """Do what the parent's lines say."""
    mine = Queue(alias, name, options, counted=counted)
    say("parent ready")
    while True:
        verb, *args = json.loads(listen())
        if verb == "acquire":
            mine.acquire(*args)
        elif verb == "tell":
            mine.orders[args[0]].put(args[1])
        elif verb == "gate":
            mine.gates.put_up(*args)
            say("parent answer null")
        elif verb == "joining":
            mine.gates.before_joining()
            say("parent answer null")
        elif verb == "open":
            mine.gates.open(*args)
        elif verb == "end":
            return
        else:
            say(f"parent answer {json.dumps(getattr(mine, verb)(*args))}")


class Queuer(Child):
    """The parent's side of ``obey``. Who asks is known by a word."""

    program = "tests.programs.queue_clients:obey"

    def __init__(
        self, alias: str, name: str, *, env: dict[str, str] | None = None, counted: bool = True, **options: Any
    ) -> None:
        super().__init__(self.program, alias, name, options, counted, env=env)
        self._said: dict[str, collections.deque[str]] = collections.defaultdict(collections.deque)
        self.alias = alias

    def ready(self, *first: str) -> Queuer:
        """Wait until it listens; do these verbs first."""
        self.word("parent", "ready", timeout=60)
        for verb in first or ("warm",):
            self.do(verb)
        return self

    def word(self, who: str, expected: str, timeout: float = 60.0) -> Any:
        """Wait for the next line of one of its threads, which must be ``expected``; return what follows."""
        deadline = time.monotonic() + timeout
        while not self._said[who]:
            speaker, _, rest = self.expect(timeout=max(0.01, deadline - time.monotonic())).partition(" ")
            self._said[speaker].append(rest)
        word, _, rest = self._said[who].popleft().partition(" ")
        assert word == expected, f"{who} said {word} {rest} instead of {expected}: {self.lines[-9:]} {self.stderr}"
        return json.loads(rest) if rest and expected != "reached" else None

    def tell(self, *line: Any) -> None:
        """Send a line."""
        self.send(json.dumps(line))

    def do(self, verb: str, *args: Any) -> Any:
        """Have something done, and wait for it."""
        self.tell(verb, *args)
        return self.word("parent", "answer", timeout=60)

    def ask(self, who: str = "a", **options: Any) -> None:
        """Have a thread acquire, without waiting for it."""
        self.tell("acquire", who, options)

    def held(self, who: str = "a", timeout: float = 60.0) -> dict[str, Any]:
        """Wait for its grant: slots, tokens, how long it waited, and when it had it."""
        found: dict[str, Any] = self.word(who, "held", timeout)
        return found

    def takes(self, who: str = "a", **options: Any) -> dict[str, Any]:
        """Have a thread acquire, and wait for the grant."""
        self.ask(who, **options)
        return self.held(who)

    def release(self, who: str = "a") -> float:
        """Have it release; return when it began to, for bounds on what came of it."""
        started = time.monotonic()
        self.tell("tell", who, "release")
        self.word(who, "released")
        return started

    def check(self, who: str = "a") -> str:
        """Have it check; return ``ours`` or the error's text."""
        self.tell("tell", who, "check")
        return str(self.word(who, "checked"))

    def is_silent(self, who: str = "a") -> bool:
        """Whether a thread has said nothing by now, or at least that nothing has gone wrong."""
        self.do("cpu")  # all that it has said is before the answer
        assert not any(line.startswith("failed") for line in self._said[who]), self.lines[-9:]
        return not self._said[who]

    def gate(self, when: str, text: str, name: str = "") -> None:
        """Hold up its next statement with this text."""
        self.do("gate", when, text, name)

    def reached(self) -> None:
        """Wait until a statement is held up."""
        self.word("gate", "reached")

    def end(self) -> None:
        """Have it end in good order."""
        self.tell("end")
        self.finish()
        assert "Traceback" not in self.stderr, self.stderr


def crowd(alias: str, name: str, tasks: int) -> None:
    """Wait in so many async tasks, with no thread for anything else."""
    gates = Gates()
    lock = semaphore(name, using=alias)
    served: list[int] = []

    async def wait(number: int) -> None:
        async with lock:
            served.append(number)

    async def main() -> None:
        lines: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(listen()))
        waiting = [asyncio.create_task(wait(number)) for number in range(tasks)]
        say("ready")
        while await lines.get() != "join":
            say(f"told {json.dumps([len(os.listdir('/proc/self/task')), gates.statements])}")
        await asyncio.gather(*waiting)
        say(f"served {json.dumps(served)}")
        await lines.get()

    lock = semaphore(name, timeout=None, using=alias)
    asyncio.run(main())
    connections.close_all()
