"""The campaign: processes with threads and tasks fight for three slots under one kind of fault after the other.

``python -m tests.proof.campaign --database postgres --fault kill stop --seconds 60``. Each database has a server, or
file, of its own, which may be killed. A log that the library has no part in says who was inside: see ``judge``.
docs/proof.md says what is judged and has the figures: ``--json FILE`` adds those of a run to a file, from which
``--report FILE`` writes the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import django
import pytest

from tests.support import servers

if __name__ == "__main__":  # no server but its own, and SQL Server if it is named
    named = {"mssql": servers.database_settings("mssql")} if os.environ.get("SQLSEM_TEST_MSSQL_URL") else {}
    os.environ["SQLSEM_TEST_DATABASES"] = json.dumps({"default": servers.sqlite_settings("/nowhere")} | named)
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()

from django.db import connections

from django_sqlsem import control, semaphore
from tests.programs.campaign_workers import NAME
from tests.proof import judge
from tests.proof.judge import Log, Rules, Verdict
from tests.support import databases, patroni, private_servers, programs, tds
from tests.support.pgbouncer import PgBouncer, pgbouncer
from tests.support.private_servers import ALIAS, private_server
from tests.support.processes import Child, is_alive
from tests.support.proxy import Proxy, proxy_for

REPORT = Path(__file__).parents[2] / "docs" / "proof.md"
BEGIN, END = "<!-- campaign -->\n", "<!-- /campaign -->\n"
DATABASES = ("sqlite", "postgres", "mariadb", "mssql")
SERVERS = ("postgres", "mariadb")
PROCESSES = 3
SLOTS = 3
LEASE = 3.0
OPTIONS = {"slots": SLOTS, "lease": LEASE, "threads": 2, "tasks": 3, "hold": 0.004}
#: How many seconds a hand-over may be late on a machine on which a sleep is late by one second.
BUSY = 20.0
#: How long the end of a run may take, in seconds.
PATIENCE = 90.0


# Where the locks are.


class Place:
    """A database of the campaign's own: SQLite's file, a server, or one on SQL Server."""

    alias = ALIAS
    server: Any = None
    pair: Any = None
    nodes: Any = None
    pooler: Any = None

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        """Return the environment of a worker."""
        return {"SQLSEM_TEST_DATABASES": databases.child_environment()["SQLSEM_TEST_DATABASES"]}


class Server(Place):
    """A private server. Workers are not its superuser, whom ``read_only`` does not keep from writing."""

    def __init__(self, server: private_servers.PrivateServer) -> None:
        self.server = server
        if server.kind == "mariadb":
            server.query("CREATE USER worker@'%'")
            server.query("GRANT ALL ON sqlsem.* TO worker@'%'")

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        known = json.loads(self.server.env(port=port)["SQLSEM_TEST_DATABASES"])
        if self.server.kind == "mariadb":
            known[ALIAS]["USER"] = "worker"
        return {"SQLSEM_TEST_DATABASES": json.dumps(known)}


class Pooled(Place):
    """A server that workers reach through PgBouncer, whose sessions are theirs for one transaction each."""

    def __init__(self, server: private_servers.PrivateServer, pooler: PgBouncer) -> None:
        self.server, self.pooler = server, pooler

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        own = {key: self.pooler.settings[key] for key in ("PORT", "OPTIONS")}
        return private_servers.environment_for(self.server.settings | own)


class Standby(Place):
    """A primary and its synchronous standby, which may be Patroni's."""

    def __init__(self, pair: private_servers.Pair | patroni.Cluster) -> None:
        self.pair = pair

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        return private_servers.environment_for(self.pair.settings)


class Nodes(Place):
    """A Galera cluster. Each worker has a node of its own, and the others in reserve."""

    def __init__(self, nodes: list[private_servers.PrivateServer]) -> None:
        self.nodes = nodes

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        first = number % len(self.nodes)
        hosts = [f"127.0.0.1:{node.port}" for node in (*self.nodes[first:], *self.nodes[:first])]
        options = json.dumps({"DATABASES": {ALIAS: {"HOSTS": hosts}}})
        return self.nodes[first].env() | {"SQLSEM_TEST_SETTINGS": options}


class TdsServer(Place):
    """The database ``mssql``, on the server that ``SQLSEM_TEST_MSSQL_URL`` names."""

    alias = "mssql"

    def env(self, number: int, port: int | None = None) -> dict[str, str]:
        found = Place.env(self, number)
        if port:
            known = json.loads(found["SQLSEM_TEST_DATABASES"])
            known[self.alias] |= {"HOST": "127.0.0.1", "PORT": str(port)}
            found = {"SQLSEM_TEST_DATABASES": json.dumps(known)}
        return found


@contextlib.contextmanager
def place(database: str, directory: str, fault: Fault) -> Iterator[Place]:
    """Open the database of one run."""
    if database == "sqlite":
        settings = servers.sqlite_settings(directory)
        if fault.journal:
            settings["OPTIONS"]["init_command"] = f"PRAGMA journal_mode={fault.journal}"
        private_servers.migrate(settings)
        with private_servers.known(ALIAS, settings):
            yield Place()
    elif database == "mssql":
        from django.test.utils import setup_databases, teardown_databases

        if tds.is_stand_in("mssql"):
            with tds.database("mssql"):
                yield TdsServer()
        else:
            made = setup_databases(verbosity=0, interactive=False, aliases={"mssql"})
            try:
                yield TdsServer()
            finally:
                teardown_databases(made, verbosity=0)
    elif "pooler" in fault.needs:
        with private_server(database) as server, pgbouncer(ALIAS, default_pool_size="20") as pooler:
            yield Pooled(server, pooler)
    elif "standby" in fault.needs:
        with private_servers.standby_pair() as pair:
            yield Standby(pair)
    elif "patroni" in fault.needs:
        with patroni.patroni_cluster() as cluster:
            yield Standby(cluster)
    elif "nodes" in fault.needs:
        with private_servers.galera_cluster() as nodes:
            yield Nodes(nodes)
    else:
        with private_server(database, **fault.options.get(database, {})) as server:
            yield Server(server)


# The proxies.


class WorstProxy(Proxy):
    """A proxy that may also be slow, or lose the next answer and the connection with it."""

    slow = 0.0
    loses = 0

    def passing(self, client: Any, data: bytes, *, asked: bool) -> None:
        if not asked and self.loses:
            self.loses -= 1
            raise ConnectionResetError("the answer is lost")  # its thread closes both sides
        if self.slow:
            time.sleep(random.uniform(0, self.slow))


# The faults.


class Run:
    """One run: workers, the log, and what is done to them."""

    def __init__(self, database: str, name: str, where: Place, directory: str, seed: int) -> None:
        self.database, self.name, self.fault, self.place, self.directory = (
            database,
            name,
            FAULTS[name],
            where,
            directory,
        )
        self.chance = random.Random(seed)
        self.path = os.path.join(directory, "campaign.log")
        self.log = Log(self.path)
        self.clocks: list[Path] = []
        self.proxies: list[WorstProxy] = []
        self.stack = contextlib.ExitStack()
        self.children: list[Child] = []
        self.late = 0.0
        self.ended = threading.Event()

    @property
    def server(self) -> Any:
        """The private server."""
        return self.place.server

    def watch(self) -> None:
        """Note by how much a sleep is late at the most: a busy machine is no mistake of anybody's."""
        while not self.ended.wait(0):
            began = time.monotonic()
            time.sleep(0.05)
            self.late = max(self.late, time.monotonic() - began - 0.05)

    def start(self) -> None:
        """Start the workers, and what watches the machine."""
        threading.Thread(target=self.watch, daemon=True).start()
        self.stack.callback(self.ended.set)
        if "server's clock" in self.fault.needs:
            self.server.stop()
            self.server.variables |= self.clock()
            self.server.start()
        while len(self.children) < PROCESSES:
            self.children.append(self.worker(len(self.children)))

    def clock(self) -> dict[str, str]:
        """Return variables for a process whose wall clock can be set by a file."""
        path = Path(self.directory) / f"clock{len(self.clocks)}"
        path.write_text("+0")
        path.chmod(0o644)
        self.clocks.append(path)
        found = servers.faketime(servers._find_faketime().where)
        return found | {"FAKETIME_TIMESTAMP_FILE": str(path), "FAKETIME_NO_CACHE": "1"}

    def worker(self, number: int) -> Child:
        """Start a worker."""
        port = None
        if "proxy" in self.fault.needs and self.database != "sqlite":
            while len(self.proxies) <= number:
                self.proxies.append(self.stack.enter_context(proxy_for(self.place.alias, WorstProxy)))
            port = self.proxies[number].port
        env = self.place.env(number, port) | (self.clock() if "clock" in self.fault.needs else {})
        options = OPTIONS | self.fault.worker
        seed = self.chance.randrange(10**9)
        target = "tests.programs.campaign_workers:work"
        child = self.stack.enter_context(Child(target, self.place.alias, self.path, seed, options, env=env))
        child.expect("ready", timeout=PATIENCE)
        return child

    def sleep(self, least: float, most: float) -> None:
        """Let some time pass."""
        time.sleep(self.chance.uniform(least, most))

    def some(self) -> list[int]:
        """Return the numbers of one worker, or of some."""
        count = self.chance.choice((1, 1, 1, 2, PROCESSES))
        return self.chance.sample(range(len(self.children)), count)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Inside the block the database is not there: nobody can be granted a slot that is free."""
        self.log.write("A")
        yield
        self.log.write("a")

    def number(self, slots: int | None, act: Callable[[], object]) -> None:
        """Change an operator's number, or pause and resume: note it before and after."""
        slots = SLOTS if slots is None else slots
        self.log.write("N", slot=slots)
        act()
        self.log.write("n", slot=slots)


def nothing(run: Run) -> None:
    run.sleep(0.5, 1)


def kill(run: Run) -> None:
    for number in run.some():
        child = run.children[number]
        run.log.write("K", pid=child.pid)
        child.kill()
        child.close()
        run.children[number] = run.worker(number)


def stop(run: Run) -> None:
    """For a moment, for longer than a hand-over may take, or past the lease."""
    stopped = [run.children[number] for number in run.some()]
    for child in stopped:
        run.log.write("S", pid=child.pid)
        child.stop(anywhere=run.database != "sqlite")
    run.sleep(*run.chance.choice(((0.1, 1), (2, 3), (LEASE, LEASE + 3))))
    for child in stopped:
        run.log.write("C", pid=child.pid)
        child.cont()


def fork(run: Run) -> None:
    for number in run.some():
        run.children[number].send("fork")


def end_sessions(run: Run) -> None:
    found = databases.session_ids(run.place.alias)
    databases.kill_sessions(run.place.alias, run.chance.sample(found, run.chance.randint(0, len(found))))


def restart(run: Run) -> None:
    with run.away():
        run.server.stop()
        run.sleep(0, 1.5)
        run.server.start()


def crash(run: Run) -> None:
    with run.away():
        run.server.kill()
        run.sleep(0, 1.5)
        run.server.start()


def end_pooler(run: Run) -> None:
    """The pooler is lost, or its sessions are ended by the server, or a worker is killed."""
    how = run.chance.choice((end_sessions, kill, None))
    if how is not None:
        how(run)
        return
    with run.away():
        run.place.pooler.stop()
        run.sleep(0, 1.5)
        run.place.pooler.start()


def promote(run: Run) -> None:
    """The primary is lost, and the standby is promoted; then it gets a standby itself."""
    with run.away():
        run.place.pair.promote()
    run.place.pair.rebuild()


def lose_leader(run: Run) -> None:
    """Patroni's primary hands over, is lost, or goes on while its Patroni stands still and another is promoted."""
    cluster = run.place.pair
    leader = cluster.primary()
    how = run.chance.choice(("hands over", "is lost", "goes on"))
    with run.away():
        if how == "hands over":
            cluster.switch_over()
        else:
            leader.kill() if how == "is lost" else leader.process.send_signal(signal.SIGSTOP)
            cluster.wait(lambda: cluster.primary() not in (None, leader))
            leader.start() if how == "is lost" else leader.process.send_signal(signal.SIGCONT)
        cluster.wait(cluster.is_whole)


def end_node(run: Run) -> None:
    """A node of a cluster takes no queries, stands still, is ended, or is lost; then it is there again.

    The second one may come back with a clock that is 3 seconds ahead: it must be refused, else it lets too many in.
    """
    node = run.chance.choice(run.place.nodes)
    others = [each for each in run.place.nodes if each is not node]
    with run.away():
        how = run.chance.choice(("refuses", "stands still", "ends", "is lost"))
        if how == "refuses":
            node.query("SET GLOBAL wsrep_reject_queries = 'ALL'")
            run.sleep(0.1, LEASE)
            node.query("SET GLOBAL wsrep_reject_queries = 'NONE'", database="")
        elif how == "stands still":
            node.process.send_signal(signal.SIGSTOP)
            run.sleep(0.1, 3)
            node.process.send_signal(signal.SIGCONT)
        else:
            node.stop() if how == "ends" else node.kill()
            run.sleep(0, 2 * LEASE)
            wrong = node is run.place.nodes[1] and run.chance.random() < 0.7
            node.variables = {"LD_PRELOAD": servers._find_faketime().where, "FAKETIME": "+3"} if wrong else {}
            private_servers.join_again(node, others)


def read_only(run: Run) -> None:
    def switch(on: str) -> None:
        if run.database == "mariadb":
            run.server.query(f"SET GLOBAL read_only = {on}")
        else:
            run.server.query(f"ALTER SYSTEM SET default_transaction_read_only = {on}")
            run.server.query("SELECT pg_reload_conf()")

    with run.away():
        switch("ON")
        run.sleep(0.1, LEASE + 2)
        switch("OFF")


def locked(run: Run) -> None:
    """Another program writes, for longer than SQLite waits too."""
    with run.away(), contextlib.closing(databases.raw_connection(ALIAS)) as other:
        other.execute("BEGIN IMMEDIATE")
        run.sleep(*run.chance.choice(((0.05, 0.5), (0.5, LEASE), (LEASE, LEASE + 10))))
        other.execute("ROLLBACK")


def cut(run: Run) -> None:
    """Reset connections and refuse new ones, or fall silent."""
    proxies = [run.proxies[number] for number in run.some()]
    refuses = run.chance.random() < 0.5
    with run.away():
        for each in proxies:
            each.refuse() if refuses else each.silence()
        run.sleep(*run.chance.choice(((0.05, 0.5), (0.5, LEASE), (LEASE, LEASE + 3))))
        for each in proxies:
            each.resume()


def delay(run: Run) -> None:
    for number in run.some():
        run.proxies[number].slow = run.chance.choice((0.0, 0.01, 0.05, 0.2))


def lose_answers(run: Run) -> None:
    run.proxies[run.chance.randrange(PROCESSES)].loses = run.chance.choice((1, 1, 2))


def fill_disk(run: Run) -> None:
    """Without room for its log PostgreSQL panics, and is started again; MariaDB waits, and looks every minute."""
    ballast = Path(tempfile.gettempdir()) / "ballast"
    with run.away():
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        if run.database == "postgres":
            with contextlib.suppress(Exception):
                run.server.query("SELECT pg_switch_wal()")
        run.sleep(0.2, 2)
        ballast.unlink()
        if run.server is not None and not run.server.answers():
            run.server.kill()
            run.server.start()
        if run.database == "mariadb":
            run.server.query("CREATE OR REPLACE TABLE room (there INT)")


def set_clocks(run: Run) -> None:
    """Set wall clocks ahead or back; libfaketime reads the file at each look."""
    path = run.chance.choice(run.clocks)
    new = path.with_suffix(".new")
    new.write_text(f"{run.chance.choice((-86400, -3600, -10, -1, 0, 1, 10, 3600, 86400)):+d}")
    new.chmod(0o644)
    new.rename(path)


def set_servers_clock(run: Run) -> None:
    """And kill somebody now and then: a slot comes back whatever the clock did."""
    set_clocks(run)
    if run.chance.random() < 0.3:
        kill(run)


def squeeze(run: Run) -> None:
    """Let a process have hardly more memory than it has now, for a while."""
    for number in run.some():
        child = run.children[number]
        try:
            size = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            _, most = resource.prlimit(child.pid, resource.RLIMIT_AS)
            resource.prlimit(child.pid, resource.RLIMIT_AS, (size + run.chance.choice((0, 1 << 20, 1 << 22)), most))
            run.sleep(0.05, 0.5)
            resource.prlimit(child.pid, resource.RLIMIT_AS, (most, most))
        except (OSError, ValueError):
            assert not is_alive(child.pid)
        if child.process.poll() is not None:
            run.log.write("E", pid=child.pid, note=str(child.process.returncode))
            child.close()
            run.children[number] = run.worker(number)


def strike(run: Run) -> None:
    """Interrupt main threads at random points. Workers cancel their tasks themselves."""
    for number in run.some():
        run.children[number].signal(signal.SIGUSR1)


def purge(run: Run) -> None:
    plan = control.plan_purge(idle=0, older_than=0, using=run.place.alias)
    control.execute_purge(plan, by="campaign")


def resize(run: Run) -> None:
    slots = run.chance.choice((1, 2, 3, 4, 5, None))
    run.number(slots, lambda: control.set_slots(NAME, slots, by="campaign", using=run.place.alias))
    run.sleep(*run.chance.choice(((0, 0.2), (0.5, 3))))


def pause(run: Run) -> None:
    run.number(0, lambda: control.pause(NAME, by="campaign", using=run.place.alias))
    run.sleep(*run.chance.choice(((0, 0.2), (0.5, 4))))
    run.number(SLOTS, lambda: control.resume(NAME, by="campaign", using=run.place.alias))


def mix(run: Run) -> None:
    """One after the other, while those before still have their effects."""
    connections[run.place.alias].close()  # the server may have ended it
    faults = [kill, stop, fork, strike, purge]
    faults += [locked] if run.database == "sqlite" else [end_sessions, restart, crash, cut, lose_answers]
    run.chance.choice(faults)(run)


@dataclass(frozen=True)
class Fault:
    """What is done to the workers, every ``every`` seconds or so.

    ``on``: the databases on which it makes sense. ``idle``: for how long a free slot may stand idle, by the pages
    "Guarantees" and "Failure modes"; the time for which the database was away does not count. ``heard``: for how
    many seconds a holder may not know yet that it has lost its slot, by database.
    """

    inject: Callable[[Run], None]
    every: float
    on: tuple[str, ...] = DATABASES
    idle: float = 3.0
    heard: dict[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    worker: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, str]] = field(default_factory=dict)
    journal: str = ""
    may_end: bool = False


#: What must be installed for some needs.
PROGRAMS = {"patroni": ("patroni", "etcd"), "pooler": ("pgbouncer",)}
#: An answer that was lost, or a session: what it may have granted is looked for, and its lease ends it at the latest.
DOUBT = LEASE + 5.0
#: A clock that is set ahead ends all leases; their holders hear of it when they are renewed, or confirmed.
RENEWED = LEASE / 4 + 1.0
#: On SQL Server who loses its session hears of it within two seconds.
SESSION = {"mssql": 2.5}

FAULTS: dict[str, Fault] = {
    "none": Fault(nothing, 1.0),
    "kill": Fault(kill, 1.5, idle=DOUBT),
    "stop": Fault(stop, 0.5, idle=DOUBT, worker={"hold": 0.02}),
    "fork": Fault(fork, 0.2, idle=DOUBT),
    "sessions": Fault(end_sessions, 0.5, (*SERVERS, "mssql"), idle=DOUBT, heard=SESSION),
    "restart": Fault(restart, 3.0, SERVERS, idle=DOUBT),
    "crash": Fault(crash, 3.0, SERVERS, idle=2 * DOUBT),
    "pooler": Fault(end_pooler, 1.5, ("postgres",), idle=DOUBT, needs=("pooler",)),
    "promotion": Fault(promote, 3.0, ("postgres",), idle=2 * DOUBT, needs=("standby",)),
    "patroni": Fault(lose_leader, 3.0, ("postgres",), idle=2 * DOUBT, needs=("patroni",)),
    "nodes": Fault(end_node, 2.0, ("mariadb",), idle=2 * DOUBT, needs=("nodes",)),
    "read-only": Fault(read_only, 2.0, SERVERS, idle=DOUBT),
    "locked": Fault(locked, 2.0, ("sqlite",), idle=DOUBT),
    "cut": Fault(cut, 2.0, (*SERVERS, "mssql"), idle=DOUBT, heard=SESSION, needs=("proxy",)),
    "delay": Fault(delay, 0.5, (*SERVERS, "mssql"), idle=DOUBT, needs=("proxy",)),
    "lost answers": Fault(lose_answers, 0.7, (*SERVERS, "mssql"), idle=DOUBT, heard=SESSION, needs=("proxy",)),
    "disk full": Fault(
        fill_disk,
        3.0,
        ("sqlite", *SERVERS),
        idle=DOUBT,
        needs=("small disk",),
        options={
            "postgres": {"wal_recycle": "off", "min_wal_size": "32MB", "max_wal_size": "32MB"},
            "mariadb": {"log-bin": "binlog"},
        },
        journal="DELETE",
    ),
    "host's clock": Fault(set_clocks, 0.3, needs=("clock",)),
    "server's clock": Fault(
        set_servers_clock, 3.0, SERVERS, idle=DOUBT, heard=dict.fromkeys(SERVERS, RENEWED), needs=("server's clock",)
    ),
    "memory": Fault(squeeze, 0.3, idle=DOUBT, worker={"hungry": True}, may_end=True),
    "signals": Fault(strike, 0.05, worker={"cancel": True}),
    "purge": Fault(purge, 0.02, worker={"rest": True}),
    "resize": Fault(resize, 0.1),
    "pause": Fault(pause, 0.5),
    "mix": Fault(mix, 0.3, ("sqlite", *SERVERS), idle=2 * DOUBT, needs=("proxy",), worker={"cancel": True}),
}


# A run, and what came of it.


@dataclass
class Result:
    """The figures of a run."""

    database: str
    fault: str
    seed: int
    seconds: float
    grants: int = 0
    faults: int = 0
    over: int = 0
    left: int = 0
    idle: float = 0.0
    lost: int = 0
    late: float = 0.0
    gave_up: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


@contextlib.contextmanager
def small_disk(needed: bool) -> Iterator[None]:
    """Let the database be on a disk of its own that is soon full."""
    if not needed:
        yield
        return
    before, path = tempfile.tempdir, tempfile.mkdtemp(prefix="sqlsem-disk-")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=777", "none", path], check=True)
    tempfile.tempdir = path
    try:
        yield
    finally:
        tempfile.tempdir = before
        subprocess.run(["umount", "-l", path], check=True)
        os.rmdir(path)


def campaign(database: str, name: str, seconds: float, grants: int, seed: int, keep: str = "") -> Result:
    """Run one fault on one database, and judge."""
    fault = FAULTS[name]
    directory = tempfile.mkdtemp(prefix="sqlsem-campaign-")
    Path(directory).chmod(0o711)  # servers look for their clocks in it
    if database in SERVERS:
        private_servers._template(database)  # not on the small disk
    result = Result(database, name, seed, 0.0)
    try:
        with small_disk("small disk" in fault.needs):
            files = tempfile.mkdtemp(prefix="sqlsem-campaign-") if "small disk" in fault.needs else directory
            with place(database, files, fault) as where:
                run = Run(database, name, where, directory, seed)
                with run.stack:
                    began = time.monotonic()
                    try:
                        _drive(run, result, seconds, grants)
                    except Exception as error:
                        traceback.print_exception(error)
                        result.broken.append(f"the run was not finished: {error!r:.300}")
                    result.seconds = round(time.monotonic() - began, 1)
        lines = list(judge.read(run.path))
        result.late = round(run.late, 3)
        rules = Rules(SLOTS, LEASE, fault.heard.get(database), fault.idle + BUSY * run.late, fault.may_end)
        _tell(result, judge.judge(lines, rules), lines)
        if result.broken:
            kept = shutil.copy(run.path, tempfile.mkdtemp(prefix="sqlsem-broken-"))
            print(f"the whole log: {kept}", file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return result


def _tell(result: Result, verdict: Verdict, lines: list[judge.Line]) -> None:
    """Note the figures, and show the log around the first event of each kind that should not have been."""
    result.grants, result.faults, result.over = verdict.grants, verdict.faults, verdict.over
    result.idle, result.lost, result.gave_up = round(verdict.idle, 3), verdict.lost, dict(verdict.gave_up)
    result.broken += [f"{what} ({count}x)" for what, count in Counter(what for what, _ in verdict.broken).items()]
    for what, numbers in dict(reversed(verdict.broken)).items():
        print(f"\n{result.database}, {result.fault}, seed {result.seed}: {what}", file=sys.stderr)
        print(*lines[max(0, min(numbers) - 30) : max(numbers) + 10], sep="\n", file=sys.stderr)


def _drive(run: Run, result: Result, seconds: float, grants: int) -> None:
    """Start the workers, do to them what is to be done, end them, and look at what is left."""
    run.start()
    began = told = time.monotonic()
    counted, place_in_file = 0, 0
    while time.monotonic() < began + seconds and counted < grants:
        run.sleep(0, 2 * run.fault.every)
        run.log.write("F")
        run.fault.inject(run)
        run.log.write("f")
        for child in run.children:
            if child.process.poll() is not None and not run.fault.may_end:
                raise AssertionError(child._story(f"ended with {child.process.returncode}"))
        if time.monotonic() > told + 5:
            told = time.monotonic()
            with open(run.path, "rb") as file:
                file.seek(place_in_file)
                data = file.read()
            place_in_file += len(data)
            counted += data[:: judge.SIZE].count(b"I")
            print(f"{run.database}, {run.name}: {told - began:.0f} s, {counted} grants", file=sys.stderr)
    _calm(run)
    for child in run.children:
        child.send("end")
    for child in run.children:
        child.expect("done", timeout=PATIENCE)
        child.finish()
    _look_for_leftovers(run, result)


def _calm(run: Run) -> None:
    """Undo what goes on."""
    for proxy in run.proxies:
        proxy.slow, proxy.loses = 0.0, 0
    for clock in run.clocks:
        clock.write_text("+0")
    if run.fault.inject is resize:
        run.number(None, lambda: control.set_slots(NAME, None, by="campaign", using=run.place.alias))


def _look_for_leftovers(run: Run, result: Result) -> None:
    """One caller takes all slots, also those of killed processes, and gives them back. Then none is held."""
    alias = run.place.alias
    connections[alias].close()

    with semaphore(NAME, slots=SLOTS, take=SLOTS, timeout=2 * LEASE + 5, using=alias):
        pass
    if left := len(databases.held_rows(alias)):
        result.left = left
        result.broken.append(f"{left} slots are left held")
    connections[alias].close()


# The report.


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all runs together."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    idle: dict[tuple[str, str], float] = {}
    for each in results:
        key = each["database"], each["fault"]
        rows.setdefault(key, Counter()).update({name: each[name] for name in ("grants", "faults", "over", "left")})
        idle[key] = max(idle.get(key, 0.0), each["idle"])
    lines = ["| Fault | Database | Grants | Faults | Over the limit | Left held | Longest idle |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for fault in FAULTS:
        for database in DATABASES:
            if (found := rows.get((database, fault))) is not None:
                figures = " | ".join(f"{found[name]:,}" for name in ("grants", "faults", "over", "left"))
                lines.append(f"| {fault} | {database} | {figures} | {idle[database, fault]:.2f} s |")
    return "\n".join(lines) + "\n"


def write_report(path: str) -> None:
    """Put the table of the results in a file between the marks in docs/proof.md."""
    results = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    text = REPORT.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    REPORT.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")


def can(name: str, database: str) -> bool:
    """Whether a fault makes sense on a database, and can be had here; says so if it cannot."""
    fault = FAULTS[name]
    if "small disk" in fault.needs and os.geteuid() != 0:
        print(f"{name} is left out: only root may mount a small disk", file=sys.stderr)
        return False
    if database not in fault.on:
        return False
    try:
        for need in fault.needs:
            for program in PROGRAMS.get(need, ()):
                programs.find(program)
        if "nodes" in fault.needs:
            private_servers.need_galera()
    except (FileNotFoundError, pytest.skip.Exception) as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--database", nargs="+", choices=DATABASES, default=["sqlite", "postgres", "mariadb"])
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--grants", type=int, default=10**9, help="per database; the faults share them")
    parser.add_argument("--seconds", type=float, default=300.0, help="per database; the faults share them")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", metavar="FILE", help="add the results to a file")
    parser.add_argument("--report", metavar="FILE", help="write the results of a file into docs/proof.md; run nothing")
    options = parser.parse_args()
    if options.report:
        write_report(options.report)
        return 0
    broken, tempfile.tempdir = False, servers.directory_in_memory()  # nobody is to wait for a disk
    for database in options.database:
        names = [name for name in options.fault if can(name, database)]
        for name in names:
            seed = random.randrange(10**6) if options.seed is None else options.seed
            result = campaign(database, name, options.seconds / len(names), options.grants // len(names), seed)
            said = json.dumps(asdict(result))
            print(said, flush=True)
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    print(said, file=file)
            broken = broken or bool(result.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
