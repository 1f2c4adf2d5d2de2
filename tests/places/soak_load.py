"""What the soak test does to its servers and workers: requests, tasks, and every kind of trouble."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.places.presence import started
from tests.places.soak_places import Program, Runs, stopped_for

#: The lengths of holds, in seconds.
SHORTEST, LONGEST = 0.001, 2.0
#: Who calls: the kind of server, the view, and how many clients.
CLIENTS: Final = (("gunicorn", "sync", 3), ("uvicorn", "sync", 2), ("uvicorn", "async", 3))
#: Tasks that wait for a worker, or to come back, at the most.
BACKLOG: Final = 30


def hold() -> float:
    """Return how long a body stays inside: as often below 45 ms as above."""
    return float(SHORTEST * (LONGEST / SHORTEST) ** random.random())


class Clients:
    """Clients in threads, some of which leave before they are answered. ``answers`` counts by place and what came."""

    def __init__(self, programs: dict[str, Program]) -> None:
        self.answers: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(programs[kind], view), name=f"client-{kind}-{view}-{number}")
            for kind, view, count in CLIENTS
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, program: Program, view: str) -> None:
        place = f"{program.kind} {view}"
        path = f"/{view}/{place.replace(' ', '%20')}"
        while not self._stop.is_set():
            leaves = random.random() < 0.15
            try:
                answer = self._leave(program.port, path) if leaves else self._stay(program.port, path)
            except ConnectionRefusedError:
                answer = "refused"
                self._stop.wait(0.3)
            except (OSError, http.client.HTTPException):
                answer = "cut"
            with self._lock:
                self.answers[place, answer] += 1
            self._stop.wait(random.random() * 0.05)

    @staticmethod
    def _stay(port: int, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", f"{path}?hold={hold():.4f}", headers={"Connection": "close"})
            response = connection.getresponse()
            response.read()
            return str(response.status)

    @staticmethod
    def _leave(port: int, path: str) -> str:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(f"GET {path}?hold={hold():.4f} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(random.random())
        return "left"

    def end(self) -> None:
        """Wait for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), thread.name


class Tasks:
    """Sends tasks, as long as not too many are on their way."""

    def __init__(self, app: Any, ran: Callable[[], int]) -> None:
        self.sent = 0
        self._app, self._ran = app, ran
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="tasks")
        self._thread.start()

    def _send(self) -> None:
        lost = 0  # with a worker that was killed: nothing new of late means that they are gone
        before, since = -1, time.monotonic()
        while not self._stop.wait(0.2):
            ran = self._ran()
            if ran != before:
                before, since = ran, time.monotonic()
            elif time.monotonic() - since > 20:
                lost, since = self.sent - ran, time.monotonic()
            if self.sent - lost - ran < BACKLOG:
                self._app.send_task("soak.work", (hold(),))
                self.sent += 1

    def end(self) -> None:
        """Send no more."""
        self._stop.set()
        self._thread.join(60)


@dataclass
class Kill:
    """A holder that was killed: what it was, and how long it took until the slot had a permit again, in seconds."""

    what: str
    slot: int
    took: float | None


class Trouble:
    """Kills, stops and restarts, one after the other, every ``pause`` seconds or so.

    ``slots`` returns the slot rows as ``(slot, pid, token)``, of held ones. ``brief``: one holder of each kind is
    killed, and no more. ``problems`` are errors of this thread.
    """

    def __init__(
        self,
        programs: dict[str, Program],
        runs: Runs,
        slots: Callable[[], list[tuple[int, int, int]]],
        pause: float,
        lease: float,
        brief: bool = False,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.kills: list[Kill] = []
        self.problems: list[BaseException] = []
        #: The processes that stood still, and until when, by the host's wall clock.
        self.stood_still: list[tuple[int, float]] = []
        self._programs, self._runs, self._slots, self._pause, self._lease = programs, runs, slots, pause, lease
        self._brief = brief
        self._stop = threading.Event()
        self._acts: list[tuple[int, str, Callable[[], object]]] = [
            (6, "kill -9 gunicorn worker", lambda: self._kill("gunicorn worker", programs["gunicorn"].workers)),
            (6, "kill -9 pool child", lambda: self._kill("pool child", programs["celery"].workers)),
            (6, "kill -9 locks run", lambda: self._kill("locks run", runs.workers)),
            (2, "kill -9 uvicorn", self._kill_uvicorn),
            (3, "kill -9 its command", self._kill_command),
            (4, "stop for a while", self._pause_someone),
            (1, "restart gunicorn", programs["gunicorn"].renew),
            (1, "restart uvicorn", programs["uvicorn"].renew),
            (1, "restart celery", programs["celery"].renew),
        ]
        self._thread = threading.Thread(target=self._run, name="trouble")
        self._thread.start()

    def _run(self) -> None:
        try:
            once = self._acts[:3] if self._brief else list(self._acts)
            random.shuffle(once)
            while not self._stop.wait(self._pause * (0.5 + random.random())) and (once or not self._brief):
                next_one = once.pop() if once else random.choices(self._acts, [each[0] for each in self._acts])[0]
                _, what, act = next_one
                act()
                self.done[what] += 1
                if self._brief and not any(what.endswith(kill.what) for kill in self.kills):
                    once.insert(0, next_one)  # the holder had given back before it was struck
        except BaseException as error:
            self.problems.append(error)

    def _kill(self, what: str, workers: Callable[[], list[int]]) -> None:
        """Kill one of them: mostly a holder, if there is one soon, else whoever may wait, start or do nothing."""
        deadline = time.monotonic() + (60 if self._brief else 10 if random.random() < 0.75 else 0)
        while True:
            pids = workers()
            holders = [pid for _, pid, _ in self._slots() if pid in pids]
            if holders or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        if not (holders or pids):
            return
        victim = random.choice(holders or pids)
        killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        while started(victim) is not None:
            time.sleep(0.001)
        # What it still has now, nobody gives back for it.
        orphans = {slot: token for slot, pid, token in self._slots() if pid == victim}
        kills = [Kill(what, slot, None) for slot in orphans]
        self.kills += kills
        while any(kill.took is None for kill in kills) and time.monotonic() < killed + 2 * self._lease:
            now = {slot: token for slot, _, token in self._slots()}
            for kill in kills:
                if kill.took is None and now.get(kill.slot, 0) > orphans[kill.slot]:
                    kill.took = time.monotonic() - killed
            time.sleep(0.02)

    def _kill_uvicorn(self) -> None:
        program = self._programs["uvicorn"]
        starting = threading.Timer(0.5, program.again)
        starting.start()
        try:
            self._kill("uvicorn", lambda: [program.process.pid])
        finally:
            starting.join()

    def _kill_command(self) -> None:
        for pid in self._runs.bodies():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pause_someone(self) -> None:
        """For much less than a lease. Who has just been handed a slot, and stands still for 2 seconds, loses it."""
        places: list[Program | Runs] = [*self._programs.values(), self._runs]
        pids = random.choice(places).workers()
        if pids:
            pid = random.choice(pids)
            stopped_for(pid, 0.3 + random.random() * 3)
            self.stood_still.append((pid, time.time()))

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait for the end of what is going on."""
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
