"""Whatever comes in: query strings, forms, command lines, and rows that somebody else has written.

No 500, no traceback, and nothing is changed. ``SQLSEM_TEST_EXAMPLES`` says how many of each are tried.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from django.core.management import CommandError, get_commands, load_command_class
from django.db import DataError, IntegrityError, connections, models, transaction
from django.test import Client
from django.urls import reverse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_sqlsem.admin import live
from django_sqlsem.admin.actions import ACTIONS
from django_sqlsem.management.verbs import VERBS
from django_sqlsem.models import SemaphoreRow, SlotRow, WaiterRow
from tests.support.databases import delete_rows
from tests.support.operators import hold, make_semaphore, wait
from tests.unit.test_admin import key, login

pytestmark = [pytest.mark.leaves_held, pytest.mark.process_side]

EXAMPLES = int(os.environ.get("SQLSEM_TEST_EXAMPLES", "40"))
MANY = settings(
    deadline=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
NAMES = ("reports", "sync:1", "sync:2", "idle")
#: Text of any kind, and what means something somewhere.
TEXT = st.one_of(st.text(max_size=12), st.sampled_from([
    "", "0", "1", "-1", "3", "9" * 30, "1e9", "nan", "inf", "\0", "%", "'", '"', "<b>", "yes", "true", "None", "null",
    "[]", "[1]", "{}", '[["reports",null,false]]', "5m", "1h", "24h", "7d", "held", "stale", "paused", "semaphore",
    "reports", "idle", "sync:{}", "*", "..", "/", "&", "\u202e",
]))  # fmt: skip
PARAMETERS = (
    "q",
    "p",
    "o",
    "e",
    "all",
    "range",
    "template",
    "state",
    "kind",
    "_facets",
    "_popup",
    "_to_field",
    "_changelist_filters",
)
LOOKUPS = st.builds(
    "__".join,
    st.lists(st.sampled_from(["state", "kind", "name", "semaphore", "key", "paused", "exact", "in", "isnull", "gt"])),
)
ADDRESSES = [
    *(
        (f"{model}_changelist", False)
        for model in ("semaphorerow", "slotrow", "claimrow", "refreshrow", "transactionlockrow")
    ),
    *((f"semaphorerow_{page}", False) for page in ("audit", "snapshots")),
    *((f"semaphorerow_{page}", True) for page in ("change", "history", "snapshot", "act")),
]
FIELDS = (
    "do",
    "action",
    "_selected_action",
    "select_across",
    "index",
    "confirmed",
    "targets",
    "slots",
    "reason",
    "for",
    "until",
    "seal",
)


def contents() -> list[Any]:
    """Return what no request may change."""
    return [list(model.objects.order_by("pk").values_list()) for model in (SemaphoreRow, SlotRow, WaiterRow)]


@pytest.fixture(scope="module")
def site(django_db_setup: None, django_db_blocker: Any) -> Iterator[Client]:
    """A site that is in use, and its superuser; made once, as hypothesis asks for as many examples as there are."""
    with django_db_blocker.unblock():
        delete_rows("default")
        for name in NAMES:
            make_semaphore("default", name, template="sync:{}" if name.startswith("sync") else "")
        hold("default", "reports")
        hold("default", "reports", slot=2, token=8, left=-5)
        wait("default", "reports")
        client = login("any input", is_superuser=True)
        client.raise_request_exception = True
        yield client
        delete_rows("default")
        from django.contrib.auth.models import User

        User.objects.filter(username="any input").delete()
        connections.close_all()


@MANY
@given(data=st.data())
def test_any_query_string_is_answered(site: Client, data: st.DataObject) -> None:
    name, one = data.draw(st.sampled_from(ADDRESSES))
    pk = data.draw(st.one_of(st.sampled_from([key("reports"), key("sync:1")]), TEXT.filter(bool))) if one else ""
    query = data.draw(st.dictionaries(st.one_of(st.sampled_from(PARAMETERS), LOOKUPS, TEXT), TEXT, max_size=4))
    headers = data.draw(
        st.sampled_from([{}, {live.HEADER: "1"}, {"Accept": "application/json"}, {"If-None-Match": '"x"'}])
    )
    before = contents()
    path = reverse(f"admin:sqlsem_{name}", args=["PK"] if one else []).replace("PK", quote(pk, safe=""))
    url = f"{path}?{urlencode(query)}"
    response = site.get(url, headers=headers)
    assert response.status_code in (200, 302, 304, 400, 403, 404), url
    assert contents() == before


@MANY
@given(data=st.data())
def test_any_form_is_answered_and_does_nothing(site: Client, data: st.DataObject) -> None:
    """What was not confirmed by the page that shows it is not done."""
    name, one = data.draw(
        st.sampled_from([("semaphorerow_changelist", False), ("slotrow_changelist", False), ("semaphorerow_act", True)])
    )
    acts = st.one_of(
        st.sampled_from(sorted(ACTIONS)),
        st.builds("{} {} {}".format, st.sampled_from(sorted(ACTIONS)), TEXT, TEXT),
        TEXT,
    )
    fields = data.draw(st.dictionaries(st.one_of(st.sampled_from(FIELDS), TEXT), TEXT, max_size=5))
    fields |= data.draw(st.dictionaries(st.sampled_from(["do", "action"]), acts, max_size=2))
    if data.draw(st.booleans()):
        fields["_selected_action"] = data.draw(st.sampled_from([key("reports"), str(SlotRow.objects.get(token=7).pk)]))
    before = contents()
    response = site.post(reverse(f"admin:sqlsem_{name}", args=[key("reports")] if one else []), fields)
    assert response.status_code in (200, 302, 400, 403), fields
    assert contents() == before


OPTIONS = (
    "--database", "--stale", "--busy", "--name", "--template", "--format", "--older-than", "--dry-run", "--idle",
    "--slot", "--token", "--reason", "--for", "--kill", "--slots", "--pause", "--resume", "--undo", "--no-acquire",
    "--using", "--", "-h",
)  # fmt: skip
#: Never with what would be done without a question, or would go on for ever.
WORDS = st.one_of(
    st.sampled_from(OPTIONS),
    st.sampled_from(NAMES),
    TEXT.filter(lambda text: not text.startswith(("--w", "--noi", "--no-i"))),
)


@MANY
@given(verb=st.one_of(st.sampled_from(sorted(set(VERBS) - {"run"})), TEXT), words=st.lists(WORDS, max_size=5))
def test_any_command_line_is_done_or_refused(site: Client, verb: str, words: list[str]) -> None:
    """It ends with an exit code that the help names, and an error of one sentence."""
    command = load_command_class(get_commands()["locks"], "locks")
    out, err = io.StringIO(), io.StringIO()
    command.stdout._out, command.stderr._out = out, err
    try:
        command.run_from_argv(["manage.py", "locks", verb, *words, "--no-color"])
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    assert code in (0, 1, 2, 75, None), (verb, words)
    assert "Traceback" not in err.getvalue()


#: What a column of that type may hold, whoever writes it.
NUMBER = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63)]))


def values_of(field: models.Field[Any, Any]) -> st.SearchStrategy[Any]:
    if isinstance(field, models.BooleanField):
        found: st.SearchStrategy[Any] = st.booleans()
    elif isinstance(field, models.IntegerField):
        small = not isinstance(field, models.BigIntegerField)
        found = NUMBER.filter(lambda number: -(2**31) <= number < 2**31) if small else NUMBER
    else:
        found = TEXT.map(lambda text: text.replace("\0", "")[: field.max_length])
    return st.one_of(st.none(), found) if field.null else found


def columns_of(model: type[models.Model]) -> list[models.Field[Any, Any]]:
    return [field for field in model._meta.concrete_fields if not field.primary_key and not field.is_relation]


@settings(MANY, max_examples=max(1, EXAMPLES // 4))  # each looks at every page
@given(data=st.data())
def test_any_row_is_shown(site: Client, data: st.DataObject) -> None:
    """On every page and by the command: nobody can say what is wrong with a lock that makes its page fail."""
    kept = {model: list(model.objects.order_by("pk").values()) for model in (SemaphoreRow, SlotRow, WaiterRow)}
    try:
        for model in kept:
            row = model.objects.order_by("pk").first()
            assert row is not None
            fields = {field.name: field for field in columns_of(model) if field.name not in ("name", "ticket", "slot")}
            chosen = data.draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=6), label=model.__name__)
            changed = {name: data.draw(values_of(fields[name]), label=name) for name in chosen}
            with contextlib.suppress(IntegrityError, DataError), transaction.atomic():
                model.objects.filter(pk=row.pk).update(**changed)  # or the database refuses it
        for name, one in ADDRESSES:
            if not name.endswith("_act"):
                pk = [SemaphoreRow.objects.order_by("pk").first().pk] if one else []  # type: ignore[union-attr]
                response = site.get(reverse(f"admin:sqlsem_{name}", args=pk))
                assert response.status_code in (200, 302), name
        for words in (
            ["list"],
            ["list", "--format", "json"],
            ["list", "--format", "csv"],
            ["waits"],
            *(["show", each] for each in NAMES),
        ):
            command = load_command_class(get_commands()["locks"], "locks")
            command.stdout._out = io.StringIO()
            with contextlib.suppress(CommandError):
                command.execute(**vars(command.create_parser("manage.py", "locks").parse_args([*words, "--no-color"])))
    finally:
        for model, rows in kept.items():
            model.objects.all().delete()
            model.objects.bulk_create([model(**row) for row in rows])
