"""Names made of several parts: unambiguous, the same lock as their written text, and filled in part by part."""

from __future__ import annotations

import asyncio
import datetime
import re
import uuid
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from django_sqlsem import (
    control,
    mutex,
    queries,
    semaphore,
)
from django_sqlsem.core.names import joined, part_texts, validate_name
from django_sqlsem.locks import rlock
from django_sqlsem.testing import busy
from tests.support import applocks
from tests.support.databases import ROOT
from tests.support.processes import Child

pytestmark = pytest.mark.process_side

PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `(\(.*?\))` \| `(.*?)` \|$", PAGE, re.MULTILINE)

parts_of_text = st.lists(st.text(st.sampled_from(":\\a1é{}"), min_size=1, max_size=6), min_size=1, max_size=6).map(
    tuple
)


def split(text: str) -> tuple[str, ...]:
    """Read the parts back, as another program would."""
    parts, position = [""], 0
    while position < len(text):
        character = text[position]
        if character == ":":
            parts.append("")
        else:
            position += character == "\\"
            parts[-1] += text[position]
        position += 1
    return tuple(parts)


@given(parts_of_text)
def test_parts_can_be_read_back(parts):
    assert split(joined(parts)) == parts


@given(parts_of_text, parts_of_text)
def test_different_parts_have_different_names(one, other):
    assume(one != other)
    assert joined(one) != joined(other)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=200))
def test_a_plain_name_stays_as_it_is(name):
    assert validate_name(name) == semaphore(name).name == name
    if ":" not in name and "\\" not in name:
        assert joined((name,)) == name


@given(st.tuples(st.integers(), st.uuids(), st.dates()))
def test_other_parts_are_written_in_one_way(parts):
    number, unique, day = part_texts(parts)
    assert re.fullmatch(r"-?(0|[1-9]\d*)", number)
    assert (int(number), uuid.UUID(unique), datetime.date.fromisoformat(day)) == parts
    assert split(joined(parts)) == (number, unique, day)


@pytest.mark.parametrize(("source", "text"), EXAMPLES)
def test_the_examples_of_the_page(source, text):
    parts = eval(source, {"UUID": uuid.UUID, "date": datetime.date})  # noqa: S307 - a page of ours
    assert joined(parts) == text
    for make in (semaphore, mutex, rlock):
        assert make(parts).name == text


def test_the_page_has_examples():
    assert len(EXAMPLES) >= 7


TRY = """
from django_sqlsem import mutex
for name in args[1]:
    name = tuple(name) if isinstance(name, list) else name
    permit = mutex(name, timeout=0, using=args[0]).try_acquire()
    say("refused" if permit is None else "got")
    if permit is not None:
        permit.release()
"""


def test_parts_and_their_text_are_one_lock_in_every_process(database):
    """Customer and table, as in the article: one customer at a time for each table, and any number of customers."""
    names = [["sync", "bookmarks", 7], "sync:bookmarks:7", ["sync", "bookmarks", "7"]]
    others = [["sync", "bookmarks", 8], ["sync", "notes", 7], ["sync:bookmarks", 7], ["sync", "bookmarks:7"]]
    with mutex(("sync", "bookmarks", 7), timeout=0, using=database):
        with Child(TRY, database, names + others) as child:
            said = [child.expect(timeout=30) for _ in names + others]
            child.finish()
        assert said == ["refused"] * len(names) + ["got"] * len(others)


def test_the_operators_side_takes_parts_and_shows_their_text(database):
    lock = semaphore(("a:b", "c"), 2, timeout=0, using=database)
    with lock as permit:
        assert control.set_slots(("a:b", "c"), 1, by="ann", using=database)
        found = queries.semaphore(("a:b", "c"), using=database)
        assert found is not None
        assert (found.name, found.slots, found.held) == (r"a\:b:c", 1, 1)
        assert queries.semaphore(r"a\:b:c", using=database) is not None
        assert control.pause(("a:b", "c"), by="ann", using=database)
        assert control.resume(("a:b", "c"), by="ann", using=database)
        kill = applocks.are_at(database)
        [revoked] = control.revoke(("a:b", "c"), by="ann", kill=kill, using=database)
        assert (revoked.name, revoked.token) == (permit.name, permit.token)
    with busy(("a:b", "c")):
        assert lock.try_acquire() is None


def test_decorators_fill_in_and_escape_each_part(database):
    seen = []

    @semaphore(("sync", "{table}", "{user.pk}", "{{}}"), timeout=0, using=database)
    def sync(table, user):
        seen.append(queries.holders(using=database)[0].name)

    @rlock(("sync", 7, "{table}"), key=lambda table, user: user.pk, timeout=0, using=database)
    async def async_sync(table, user):
        seen.extend(name for name in [r"sync:7:a\\:8\:9", "sync:7:a"] if rlock(name, using=database).depth())

    @mutex("plain:{table}", key=lambda table, user: (table, user.pk), timeout=0, using=database)
    def keyed(table, user):
        seen.append(queries.holders(using=database)[0].name)

    user = SimpleNamespace(pk="8:9")
    sync("book:marks", user)
    asyncio.run(async_sync("a\\", user))
    keyed("x:y", user)
    assert seen == [r"sync:book\:marks:8\:9:{}", r"sync:7:a\\:8\:9", r"plain:x:y:x\:y:8\:9"]
    with pytest.raises(
        ValueError, match=r"The field 'table' of the semaphore's name 'sync:.table.:.*' is empty in this call"
    ):
        sync("", user)
    with pytest.raises(ValueError, match=r"its parts joined, must have 1 to 200 characters, not 20[0-9]") as error:
        semaphore(("x" * 100, "{table}" + "y" * 100))
    with pytest.raises(ValueError, match="must have 1 to 200 characters, not 21"):
        sync(":" * 100, user)
    assert "xxxxx" in str(error.value)
