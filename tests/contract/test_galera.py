"""Three nodes of a Galera cluster that are all written to: of two transactions with one lock, one commits."""

from __future__ import annotations

import contextlib
import json

import pytest

from django_sqlsem.database.dialects import MySQL
from tests.programs.fence_clients import Fencer
from tests.programs.outage_clients import Sufferer
from tests.programs.transaction_clients import Transactor
from tests.support.private_servers import ALIAS, galera_cluster
from tests.support.processes import Child
from tests.support.threads import wait_until

_NOW = MySQL.now_sql


@pytest.fixture(scope="module")
def nodes():
    """The servers of one cluster."""
    with galera_cluster() as found:
        yield found


class Numbers:
    """A row for each node, with the number that it took last: the next of all rows. No two nodes write one row."""

    def __init__(self, nodes, name):
        self.nodes, self.name = nodes, name
        self.names = [f"{name} {row}" for row in range(len(nodes))]
        for each in self.names:
            nodes[0].query(f"INSERT INTO testapp_probe (name, inside, peak, entered) VALUES ('{each}', 0, 0, 0)")
        self.among = "name IN ({})".format(", ".join(f"'{each}'" for each in self.names))
        self.next = f"SELECT MAX(entered) + 1 FROM testapp_probe WHERE {self.among}"
        self.agreed()

    def write(self, row, number="%s"):
        """Return the statement by which a row takes a number."""
        return f"UPDATE testapp_probe SET entered = {number} WHERE name = '{self.names[row]}'"

    def agreed(self):
        """Return the numbers, once every node has the same."""
        sql = f"SELECT entered FROM testapp_probe WHERE {self.among} ORDER BY name"

        def same():  # what another node has committed may not have arrived at the first one yet
            found = [node.query(sql) for node in self.nodes]
            return found[0] if all(each == found[0] for each in found) else None

        agreed = wait_until(same, what="the nodes agree")
        assert len(agreed) == len(self.nodes)
        return [row[0] for row in agreed]


@pytest.fixture
def numbers(nodes, request):
    """Rows of the test's own."""
    return Numbers(nodes, request.node.name[:60])


class OnNode(Transactor):
    """A process whose transactions are those of one node."""

    def __init__(self, node):
        super().__init__(ALIAS, env=node.env())

    def locks(self, verb, **options):
        """Lock a name, or a table, in its transaction."""
        self.send(f"{verb} {json.dumps(options)}")
        return float(self.expect("locked"))

    def takes_number(self, numbers, row):
        """Take the next number of all, as its node knows them."""
        ((number,),) = self.sql(numbers.next)
        self.sql(numbers.write(row, number))

    def commits(self):
        """Commit, and return whether it worked: else by the error of one that lost a deadlock."""
        self.send("commit")
        line = self.expect(timeout=30)
        assert line == "ended" or "1213" in line, line
        return line == "ended"


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("verb", ["lock", "table"])
def test_of_two_transactions_on_two_nodes_one_commits(nodes, numbers, verb, shared):
    options = {"name": numbers.name} if verb == "lock" else {}
    with OnNode(nodes[0]) as first, OnNode(nodes[1]) as second:
        for row, each in enumerate((first, second)):
            each.begin()
            assert each.locks(verb, timeout=0, shared=shared, **options) == 0
            each.takes_number(numbers, row)
        assert first.commits()
        assert not second.commits()
        assert numbers.agreed() == [1, 0, 0]
        second.begin()
        second.locks(verb, **options)
        second.takes_number(numbers, 1)
        assert second.commits()
    assert numbers.agreed() == [1, 2, 0]


def test_of_one_node_the_second_waits(nodes, numbers):
    with OnNode(nodes[0]) as first, OnNode(nodes[0]) as second:
        for each in (first, second):
            each.begin()
        assert first.lock(numbers.name, shared=True) == 0
        second.wait_for(numbers.name, shared=True)
        first.takes_number(numbers, 0)
        assert first.commits()
        assert second.locked() > 0
        second.takes_number(numbers, 1)
        assert second.commits()
    assert numbers.agreed() == [1, 2, 0]


def test_a_name_that_is_purged_meanwhile(nodes, numbers):
    with OnNode(nodes[0]) as first, OnNode(nodes[1]) as second:
        first.begin()
        first.lock(numbers.name)
        first.takes_number(numbers, 0)
        code = "from django_sqlsem.locks import purge_transaction_locks; say(purge_transaction_locks(using=args[0]))"
        with Child(code, ALIAS, env=nodes[2].env()) as purger:
            assert int(purger.expect()) >= 1
        second.begin()
        second.lock(numbers.name, timeout=10)
        second.takes_number(numbers, 1)
        assert second.commits()
        assert not first.commits()
    assert numbers.agreed() == [0, 1, 0]


BODIES = """
from django.db import DatabaseError, connections, transaction
from django_sqlsem import DeadlockError
from django_sqlsem.locks import locked_atomic, transaction_lock

alias, name, following, write, form, bodies = args
connection = connections[alias]
connection.ensure_connection()
say("ready")
listen()
done, lost = [], 0
while len(done) < bodies:
    try:
        if form == "block":
            block, lock = locked_atomic(name, using=alias), lambda: None
        else:
            block, lock = transaction.atomic(using=alias), lambda: transaction_lock(name, using=alias)
        with block:
            lock()
            with connection.cursor() as cursor:
                cursor.execute(following)
                (number,) = cursor.fetchone()
                cursor.execute(write, [number])
        done.append(number)
    except (DeadlockError, DatabaseError) as error:
        assert isinstance(error, DeadlockError) or error.args[0] == 1213, error
        lost += 1
say(f"done {lost} {' '.join(map(str, done))}")
"""


@pytest.mark.parametrize("form", ["block", "call"])
@pytest.mark.parametrize("where", ["on every node", "on one node"])
def test_what_commits_came_one_after_the_other(nodes, numbers, form, where):
    bodies = 60
    with contextlib.ExitStack() as stack:
        children = []
        for row, node in enumerate(nodes):
            arguments = (ALIAS, numbers.name, numbers.next, numbers.write(row), form, bodies)
            env = nodes[0].env() if where == "on one node" else node.env()
            children.append(stack.enter_context(Child(BODIES, *arguments, env=env)))
        for child in children:
            child.expect("ready")
        for child in children:
            child.send("go")
        told = [child.expect("done", timeout=120).split() for child in children]
    taken = sorted(int(number) for each in told for number in each[1:])
    assert taken == list(range(1, bodies * len(nodes) + 1)), "two took the same number"
    assert max(numbers.agreed()) == len(taken)
    if where == "on one node":
        assert sum(int(each[0]) for each in told) == 0, "who waited for a row lock lost a transaction"


def of(name):
    """Return the rest of a query of a name's slots or waiters, ``t``."""
    return f"t JOIN sqlsem_semaphore m ON m.name_key = t.semaphore_key WHERE m.name = '{name}'"


# A hand-over that is told before this node has it.

PASSER_BY = """
from django_sqlsem import semaphore
lock = semaphore(args[1], using=args[0], timeout=60)
say("ready")
listen()
with lock as permit:
    pass
say(f"released {permit.lost}")
listen()
"""


def test_a_slot_that_was_handed_over_by_another_node_is_no_loss(nodes):
    """The rows of it wait behind a long transaction; the bell, which both processes have, does not."""
    nodes[0].query("CREATE TABLE IF NOT EXISTS long_ones (id INT AUTO_INCREMENT PRIMARY KEY, number INT)")
    for each in range(12):  # about every second one comes in the right moment
        name = f"handed-{each}"
        with (
            Sufferer(ALIAS, name, env=nodes[0].env()) as holder,
            Child(PASSER_BY, ALIAS, name, env=nodes[1].env()) as by,
        ):
            holder.does("acquire 5", "held")
            by.expect("ready")
            by.send()
            waits = f"SELECT 1 FROM sqlsem_waiter {of(name)}"
            wait_until(lambda waits=waits: nodes[0].query(waits), what="one waits")
            nodes[0].query("INSERT INTO long_ones (number) SELECT seq FROM seq_1_to_10000")
            holder.does("release", "released")
            assert by.expect("released", timeout=30) == "None", by.stderr
            held = f"SELECT 1 FROM sqlsem_slot {of(name)} AND t.expires_us IS NOT NULL"
            assert nodes[1].query(f"SET STATEMENT wsrep_sync_wait = 1 FOR {held}") == [], by.stderr
            by.send()


# A node that takes no statements.


@pytest.mark.parametrize("verb", ["acquire", "aacquire"])
def test_a_node_that_is_not_ready_means_ask_another(nodes, verb):
    hosts = [f"127.0.0.1:{each.port}" for each in nodes[:2]]
    env = nodes[0].env() | {"SQLSEM_TEST_SETTINGS": json.dumps({"DATABASES": {ALIAS: {"HOSTS": hosts}}})}
    names = (f"ready-{verb}", f"new-{verb}")
    with Sufferer(ALIAS, names[0], env=env) as child, Sufferer(ALIAS, names[1], env=env) as new:
        child.does(f"{verb} 5", "held")
        child.does("release", "released")
        nodes[0].query("SET GLOBAL wsrep_reject_queries = 'ALL'")
        try:
            for each, name in zip((child, new), names, strict=True):
                each.does(f"{verb} 0", "held")
                held = f"SELECT t.pid FROM sqlsem_slot {of(name)} AND t.expires_us IS NOT NULL"
                assert nodes[1].query(held) == [(each.pid,)], "granted on the other node"
                each.does("check", "ours")
                each.does("release", "released")
                assert "is away" not in each.stderr
        finally:
            nodes[0].query("SET GLOBAL wsrep_reject_queries = 'NONE'", database="")


# Clocks.


WRONG_CLOCK = """
import time
from django_sqlsem import semaphore
from django_sqlsem.database import dialects
from django_sqlsem.exceptions import BackendError
alias, name, ports = args
right, wrong, real = dialects.MySQL.now, 0.0, time.time
def now(dialect, cursor):
    shifted = cursor.db.settings_dict["PORT"] in ports
    return right(dialect, cursor) + int(shifted * wrong * 1_000_000)
dialects.MySQL.now = now
dialects._KNOWN_FOR = 0.2  # else it takes a minute until a clock is looked at again
lock = semaphore(name, using=alias, timeout=20)
while True:
    wrong = float(listen())
    time.sleep(0.25)
    try:
        with lock:
            say("held")
    except BackendError as error:
        say(f"refused {error}")
"""


def test_a_node_with_another_time_than_the_host_is_refused(nodes):
    with Child(WRONG_CLOCK, ALIAS, "wrong clock", [nodes[0].port, str(nodes[0].port)], env=nodes[0].env()) as child:
        for shift, said in [
            ("0.3", ""),
            ("3", "3.0 s ahead of this host's, where 0.5 s are allowed"),
            ("0", ""),
            ("-0.8", "0.8 s behind this host's, where 0.5 s are allowed"),
            ("0", ""),
        ]:
            child.send(shift)
            if said:
                text = child.expect("refused")
                assert text.startswith(f"The database {ALIAS!r} failed: the clock of this node of a cluster is {said}.")
            else:
                child.expect("held")


def test_a_node_with_the_time_of_the_host_is_asked_instead(nodes):
    hosts = [f"127.0.0.1:{each.port}" for each in nodes[:2]]
    env = nodes[0].env() | {"SQLSEM_TEST_SETTINGS": json.dumps({"DATABASES": {ALIAS: {"HOSTS": hosts}}})}
    with Child(WRONG_CLOCK, ALIAS, "other clock", [nodes[0].port, str(nodes[0].port)], env=env) as child:
        child.send("3")
        child.expect("held")


# Fences.


def fencer(node, numbers, row, lease=60):
    """A process on a node that takes one mutex, and writes to a row of its own in a fenced transaction."""
    options = {"kind": "mutex", "lease": lease, "row": numbers.names[row]}
    return Fencer(ALIAS, numbers.name, env=node.env(), **options)


def fences(child, row):
    """Have a holder write in a fenced transaction, and leave it open."""
    assert child.tell("believe") == "believes"
    assert child.tell("begin") == "begun"
    for _ in range(2):  # the second finds its row written by its own transaction
        assert child.tell("fence", timeout=2.5) == "fenced"
    assert child.tell(f"write {row + 1}") == "written"


def written(numbers):
    """Return who has written, by the node's number plus 1."""
    numbers.agreed()
    return [row[0] for row in numbers.nodes[0].query(f"SELECT inside FROM testapp_probe WHERE {numbers.among}")]


def test_a_fenced_transaction_does_not_commit_after_the_next_holder(nodes, numbers):
    with fencer(nodes[0], numbers, 0, lease=2) as first, fencer(nodes[1], numbers, 1) as second:
        fences(first.holds(), 0)
        first.stop()
        second.waits().granted()
        fences(second, 1)
        assert second.tell("commit") == "committed"
        assert second.token > first.token
        first.cont()
        assert "1213" in first.tell("commit")
        second.end()
    assert written(numbers) == [0, 2, 0]


def test_a_fenced_transaction_commits_after_its_lease_if_nobody_came(nodes, numbers):
    with fencer(nodes[0], numbers, 0, lease=2) as first, fencer(nodes[1], numbers, 1) as second:
        fences(first.holds(), 0)
        first.stop()
        expired = f"SELECT COUNT(*) FROM sqlsem_slot WHERE token = {first.token} AND expires_us < {_NOW}"
        wait_until(lambda: nodes[1].query(expired) == [(1,)], what="its lease has run out")
        first.cont()
        assert first.tell("commit") == "committed"
        assert first.tell("release") == "released"
        second.waits().granted()
        assert second.token > first.token
        second.end()
    assert written(numbers) == [1, 0, 0]


def test_on_one_node_the_next_holder_waits_for_a_fenced_transaction(nodes, numbers):
    with fencer(nodes[0], numbers, 0, lease=2) as first, fencer(nodes[0], numbers, 1) as second:
        fences(first.holds(), 0)
        first.stop()
        expired = f"SELECT COUNT(*) FROM sqlsem_slot WHERE token = {first.token} AND expires_us < {_NOW} - 3000000"
        second.waits()
        wait_until(lambda: nodes[0].query(expired) == [(1,)], what="its lease ran out three seconds ago")
        assert second.lines == ["ready"]
        first.cont()
        assert first.tell("commit") == "committed"
        assert first.tell("release") == "released"
        second.granted()
        second.end()
    assert written(numbers) == [1, 0, 0]


def test_a_revocation_on_another_node_has_a_fenced_transaction_fail(nodes, numbers):
    code = "from django_sqlsem import control; say(len(control.revoke(args[1], 1, args[2], by='me', using=args[0])))"
    with fencer(nodes[0], numbers, 0) as first:
        fences(first.holds(), 0)
        with Child(code, ALIAS, numbers.name, first.token, env=nodes[1].env()) as operator:
            assert operator.expect() == "1"
        assert "1213" in first.tell("commit")
    assert written(numbers) == [0, 0, 0]
