"""Database servers of a test's own, which it may kill and start again: ``with private_server("postgres") as server``.

A template with the tables is made once per test process, and copied for each server. ``galera_cluster()`` starts
several MariaDB servers that replicate to one another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.db import connections

from tests.support import programs
from tests.support.databases import ROOT, child_environment
from tests.support.processes import is_alive
from tests.support.servers import without_tls
from tests.support.threads import wait_until

#: The alias under which a private server is known in the test's process and in those started with ``server.env()``.
ALIAS = "private"
#: What can be started, by the names that the covered databases have.
KINDS = ("postgres", "mariadb")
_DATABASE = "sqlsem"
_PATIENCE = 30.0
#: What makes MariaDB a node of a Galera cluster.
GALERA = "/usr/lib/galera/libgalera_smm.so"


class PrivateServer:
    """A server on a free port of this host, with its data in ``directory``."""

    def __init__(self, kind: str, directory: Path, options: dict[str, str]) -> None:
        self.kind = kind
        self.directory = directory
        self.options = options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory / "log"
        #: More variables of its environment.
        self.variables: dict[str, str] = {}
        #: When it was found to answer.
        self.answered = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Its entry of ``DATABASES``."""
        return {
            "ENGINE": f"django.db.backends.{'postgresql' if self.kind == 'postgres' else 'mysql'}",
            "NAME": _DATABASE,
            "USER": "postgres" if self.kind == "postgres" else "root",
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "OPTIONS": {} if self.kind == "postgres" else {"charset": "utf8mb4"} | without_tls("127.0.0.1"),
            "TEST": {"NAME": _DATABASE},
        }

    def env(self, *, port: int | None = None) -> dict[str, str]:
        """Return the environment for a child process that knows the server as ``ALIAS``, on another port if given."""
        return environment_for(self.settings | ({"PORT": str(port)} if port else {}))

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._outlive_the_second()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment_in(self.directory) | self.variables,
                **user_of(self.kind),
            )
        self.wait()

    def _outlive_the_second(self) -> None:
        """Wait for the end of the second in which it was started.

        MariaDB tells its start in whole seconds: of two in one second the later would be taken for the one before.
        """
        wait_until(lambda: self.kind == "postgres" or int(time.time()) > int(self.answered))

    def wait(self) -> None:
        """Wait until it answers."""
        assert self.process is not None
        deadline = time.monotonic() + _PATIENCE
        while not self.answers():
            assert self.process.poll() is None, f"the server has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"the server does not answer:\n{self.log.read_text()}"
            time.sleep(0.02)
        self.answered = time.time()

    def answers(self) -> bool:
        """Whether it answers a query."""
        try:
            self.query("SELECT 1", database="")
        except Exception:
            return False
        return True

    def query(self, sql: str, *, database: str = _DATABASE) -> list[tuple[Any, ...]]:
        """Run one statement on a plain connection of its own, in autocommit, and return its rows."""
        with contextlib.closing(self._connect(database)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []

    def kill(self) -> None:
        """End all of its processes by SIGKILL, as when the host loses its power but for what is in its caches."""
        if self.process is None:
            return
        self._outlive_the_second()  # before the kill, as a holder has only a second to come back
        # Stopped first: it would start new processes, and those it has would tidy up once they noticed its end.
        self.process.send_signal(signal.SIGSTOP)
        children = children_of(self.process.pid)
        for pid in [self.process.pid, *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self.process = None
        deadline = time.monotonic() + 10
        while any(map(is_alive, children)):
            assert time.monotonic() < deadline, f"some of {children} are still there"
            time.sleep(0.005)

    def stop(self) -> None:
        """End it in an orderly way, fast: sessions are ended, and no data is lost."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT if self.kind == "postgres" else signal.SIGTERM)
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self.process = None

    def close(self) -> None:
        """End it however it goes fastest, and remove its data."""
        if self.process is not None and self.kind == "postgres":
            self.process.send_signal(signal.SIGQUIT)  # at once, but it gives its shared memory back
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                self.process = None
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _command(self) -> list[str]:
        data, port = self.directory / "data", str(self.port)
        if self.kind == "postgres":
            # What is written reaches the system's caches, which is enough for a kill.
            fixed = {
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": "",
                "fsync": "off",
                "shared_buffers": "16MB",
            }
            given = [part for item in (fixed | self.options).items() for part in ("-c", "=".join(item))]
            return [str(Path(programs.find("initdb")).parent / "postgres"), "-D", str(data), "-p", port, *given]
        fixed = {
            "datadir": str(data),
            "port": port,
            "bind-address": "127.0.0.1",
            "socket": str(self.directory / "socket"),
            "pid-file": str(self.directory / "pid"),
            "innodb-buffer-pool-size": "16M",
            "innodb-log-file-size": "8M",
            "skip-name-resolve": "1",
        }
        given = [f"--{name}={value}" for name, value in (fixed | self.options).items()]
        return [programs.find("mariadbd"), "--no-defaults", *given]

    def _connect(self, database: str) -> Any:
        if self.kind == "postgres":
            import psycopg

            return psycopg.connect(
                host="127.0.0.1",
                port=self.port,
                user="postgres",
                dbname=database or "postgres",
                autocommit=True,
                connect_timeout=5,
            )
        import MySQLdb

        named = without_tls("127.0.0.1") | ({"database": database} if database else {})
        connection = MySQLdb.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=5, **named)
        connection.autocommit(True)
        return connection


@contextlib.contextmanager
def private_server(kind: str, **options: str) -> Iterator[PrivateServer]:
    """Run a server of one of ``KINDS`` with the tables in it, known to Django as ``ALIAS``. Skips without its programs.

    ``options`` are settings of the server: ``wal_writer_delay="10s"``.
    """
    with _running(kind, options) as server, known(ALIAS, server.settings):
        yield server


@contextlib.contextmanager
def _running(kind: str, options: dict[str, str]) -> Iterator[PrivateServer]:
    programs.need("initdb" if kind == "postgres" else "mariadbd")
    template = _template(kind)
    directory = new_directory(kind)
    server = PrivateServer(kind, directory, options)
    try:
        subprocess.run(["cp", "-a", f"{template}/data", f"{directory}/data"], check=True)
        server.start()
        yield server
    finally:
        server.close()


class Pair:
    """A primary of PostgreSQL and its synchronous standby, which may be promoted; clients know both addresses."""

    def __init__(self, primary: PrivateServer) -> None:
        self.primary = primary
        self.standby = self._standby(free_port())

    @property
    def settings(self) -> dict[str, Any]:
        """Their entry of ``DATABASES``."""
        return settings_of_hosts([self.primary, self.standby])

    def promote(self) -> None:
        """The primary's host is lost: have the standby take its part, alone as yet."""
        self.primary.kill()
        self.standby.query("SELECT pg_promote()", database="")
        self.primary, self.standby = self.standby, self.primary
        self._wait_for("")

    def rebuild(self) -> None:
        """Give the primary a standby again, at the address of the one that was lost."""
        self.standby.close()
        self.standby = self._standby(self.standby.port)

    def _standby(self, port: int) -> PrivateServer:
        directory = new_directory("postgres")
        source = f"host=127.0.0.1 port={self.primary.port} user=postgres"
        program = Path(programs.find("initdb")).parent / "pg_basebackup"
        command = [program, "-D", directory / "data", "-R", "-c", "fast", "--no-sync", "-d", source]
        subprocess.run(command, cwd=directory, env=environment_in(directory), check=True, **user_of("postgres"))
        standby = PrivateServer("postgres", directory, self.primary.options)
        standby.port = port
        standby.start()
        self._wait_for("*")
        state = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: self.primary.query(state, database=""), timeout=_PATIENCE, what="a synchronous standby")
        return standby

    def _wait_for(self, standbys: str) -> None:
        """Have commits wait for these standbys from now on."""
        self.primary.query(f"ALTER SYSTEM SET synchronous_standby_names = '{standbys}'", database="")
        self.primary.query("SELECT pg_reload_conf()", database="")


@contextlib.contextmanager
def standby_pair() -> Iterator[Pair]:
    """Run a primary and a standby with the tables in them, known to Django as ``ALIAS``. Skips without PostgreSQL."""
    with contextlib.ExitStack() as stack:
        pair = Pair(stack.enter_context(_running("postgres", {})))
        stack.callback(lambda: (pair.standby.close(), pair.primary.close()))
        stack.enter_context(known(ALIAS, pair.settings))
        yield pair


def settings_of_hosts(servers: list[PrivateServer]) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for whichever of some PostgreSQL servers takes writes."""
    return servers[0].settings | {
        "HOST": ",".join("127.0.0.1" for _ in servers),
        "PORT": ",".join(sorted(str(each.port) for each in servers)),
        "OPTIONS": {"target_session_attrs": "read-write", "connect_timeout": 3},
    }


def environment_for(settings: dict[str, Any]) -> dict[str, str]:
    """Return the environment for a child process that knows a database as ``ALIAS``."""
    databases = json.loads(child_environment()["SQLSEM_TEST_DATABASES"])
    return {"SQLSEM_TEST_DATABASES": json.dumps(databases | {ALIAS: settings})}


def galera_node(address: str = "", provider: str = "", **options: str) -> dict[str, str]:
    """Return the options of a node that joins the one at ``address``, or begins a cluster. Skips without Galera."""
    import pytest

    programs.need("mariadbd")
    if not os.path.exists(GALERA):
        pytest.skip(f"no Galera: {GALERA} is not installed")
    fixed = {
        "wsrep-on": "ON",
        "wsrep-provider": GALERA,
        "wsrep-provider-options": provider or "gmcast.listen_addr=tcp://127.0.0.1:0",
        "wsrep-cluster-address": f"gcomm://{address}",
        "wsrep-node-address": "127.0.0.1",
        "binlog-format": "ROW",
        "default-storage-engine": "InnoDB",
        "innodb-autoinc-lock-mode": "2",
    }
    return fixed | options


def need_galera() -> None:
    """Skip without the programs of a Galera cluster."""
    import pytest

    galera_node()  # skips
    if shutil.which("rsync") is None:
        pytest.skip("no rsync, with which a node receives")


@contextlib.contextmanager
def galera_cluster(nodes: int = 3, **options: str) -> Iterator[list[PrivateServer]]:
    """Run the nodes of a Galera cluster with the tables in it. Skips without its programs.

    All begin with the same data at the same point of the cluster's history, so that no node has to send a copy to
    another. ``server.env()`` leads a child process to one node, as ``ALIAS``; in this process that is the first.
    """
    need_galera()
    template = _galera_template()
    servers: list[PrivateServer] = []
    try:
        for _ in range(nodes):
            directory = new_directory("mariadb")
            subprocess.run(["cp", "-a", f"{template}/data", f"{directory}/data"], check=True)
            listens, receives = free_port(), free_port()
            provider = f"gmcast.listen_addr=tcp://127.0.0.1:{listens};ist.recv_addr=127.0.0.1:{receives}"
            first = f"127.0.0.1:{_listens(servers[0])}" if servers else ""
            # A node that joins starts a receiver, though it gets no copy: other clusters' have the usual port.
            own = {"wsrep-sst-receive-address": f"127.0.0.1:{free_port()}"}
            node = galera_node(first, provider + ";gcache.size=32M", **own, **options)
            servers.append(PrivateServer("mariadb", directory, node))
            servers[-1].start()
        deadline = time.monotonic() + _PATIENCE
        for server in servers:
            while server.query("SHOW STATUS LIKE 'wsrep_cluster_size'") != [("wsrep_cluster_size", str(nodes))]:
                assert time.monotonic() < deadline, f"the nodes have not met:\n{server.log.read_text()}"
                time.sleep(0.02)
        with known(ALIAS, servers[0].settings):
            yield servers
    finally:
        for server in reversed(servers):
            server.close()


def join_again(node: PrivateServer, others: list[PrivateServer]) -> None:
    """Start a node of a cluster that has ended; it gets what it has missed from one of the others."""
    node.options["wsrep-cluster-address"] = "gcomm://" + ",".join(f"127.0.0.1:{_listens(each)}" for each in others)
    node.start()


def _listens(server: PrivateServer) -> str:
    return server.options["wsrep-provider-options"].partition(";")[0].rpartition(":")[2]


@functools.cache
def _galera_template() -> Path:
    """Make the data directory of a node that has left a cluster, once: it knows how far it had come."""
    directory = Path(tempfile.mkdtemp(prefix="sqlsem-galera-template-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    _give(directory, "mariadb")
    subprocess.run(["cp", "-a", f"{_template('mariadb')}/data", f"{directory}/data"], check=True)
    server = PrivateServer("mariadb", directory, galera_node())
    server.start()
    try:
        server.stop()
    finally:
        server.kill()
    return directory


@contextlib.contextmanager
def known(alias: str, settings: dict[str, Any]) -> Iterator[None]:
    """Let Django know one more alias, in this process."""
    defaults = connections.configure_settings({"default": connections.databases["default"], alias: settings})
    connections.databases[alias] = defaults[alias]
    try:
        yield
    finally:
        from django_sqlsem import lifecycle

        lifecycle.stop_all()
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]


@functools.cache
def _template(kind: str) -> Path:
    """Make the data directory of a server with the tables in it, once."""
    directory = Path(tempfile.mkdtemp(prefix=f"sqlsem-{kind}-template-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    _give(directory, kind)
    data = str(directory / "data")
    if kind == "postgres":
        command = [programs.find("initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    else:
        command = [str(_beside(programs.find("mariadbd"), "mariadb-install-db")), "--no-defaults", f"--datadir={data}"]
        command += ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
    made = subprocess.run(
        command,
        cwd=directory,
        env=environment_in(directory),
        capture_output=True,
        text=True,
        check=False,
        **user_of(kind),
    )
    assert made.returncode == 0, f"{made.stdout}\n{made.stderr}"
    server = PrivateServer(kind, directory, {})
    server.start()
    try:
        server.query(f"CREATE DATABASE {_DATABASE}", database="")
        migrate(server.settings)
        server.stop()
    finally:
        server.kill()
    return directory


def migrate(settings: dict[str, Any]) -> None:
    """Create the tables of the tests in a database."""
    environment = child_environment(SQLSEM_TEST_DATABASES=json.dumps({"default": settings}))
    command = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def user_of(kind: str) -> dict[str, Any]:
    """Return what starts a process as the user of such a server, if we are root."""
    return programs.other_user("postgres") if kind == "postgres" else programs.other_user("mysql")


def environment_in(directory: Path) -> dict[str, str]:
    """Return the environment of a server: one that starts deletes the temporary tables of all in its directory."""
    return os.environ | {"LC_ALL": "C", "TMPDIR": str(directory)}


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """Return all processes that a process started, and those started by them."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        new = parents.get(left.pop(), [])
        found += new
        left += new
    return found


def new_directory(kind: str) -> Path:
    """Make a directory that is the servers' own."""
    directory = Path(tempfile.mkdtemp(prefix=f"sqlsem-{kind}-"))
    _give(directory, kind)
    return directory


def _give(directory: Path, kind: str) -> None:
    if user := user_of(kind):
        os.chown(directory, user["user"], user["group"])


def _beside(program: str, name: str) -> Path:
    if found := shutil.which(name):
        return Path(found)
    return Path(program).parent / name
