"""What somebody new sees who forgot an ``f``, or uses a decorator's arguments elsewhere: an error with the cure.

Each script is run by an interpreter of its own, in a small project.
"""

from __future__ import annotations

import textwrap

import pytest

DJANGO = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"
import django
django.setup()
"""
#: What is in the scripts after that, and what the last lines of their errors say.
MISTAKES = {
    "a forgotten f": (
        """
        from django_sqlsem import semaphore
        pk = 7
        with semaphore("import:{pk}"):
            print("imported")
        """,
        "ValueError: 'import:{pk}' has the field {pk}, which only a decorator fills in",
        "Write an f-string: f'import:{pk}'.",
    ),
    "a forgotten f in a coroutine": (
        """
        import asyncio
        from django_sqlsem import mutex
        async def sync(user):
            async with mutex("sync:{user.pk}"):
                print("synchronized")
        asyncio.run(sync(None))
        """,
        "ValueError: 'sync:{user.pk}' has the field {user.pk}, which only a decorator fills in",
        "Write an f-string: f'sync:{user.pk}'.",
    ),
    "on_busy in a block": (
        """
        from django_sqlsem import semaphore
        with semaphore("import", on_busy="skip"):
            print("imported")
        """,
        "TypeError: on_busy='skip' says what becomes of a decorated call of 'import' that is busy, and here is none",
        "use try_acquire(), or catch AcquireTimeoutError, and give on_busy to the decorator.",
    ),
    "key in a block": (
        """
        from django_sqlsem import semaphore
        with semaphore("import", key=lambda pk: pk):
            print("imported")
        """,
        "TypeError: key= gets a decorated function's arguments, and here is none",
        "put the key into 'import'.",
    ),
    "a field of no argument": (
        """
        from django_sqlsem import semaphore
        @semaphore("import:{pk}")
        def run(number):
            print("imported")
        """,
        "{pk}",
        "number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_a_script_with_an_error_that_says_what_to_write(make_project, mistake):
    script, *told = MISTAKES[mistake]
    project = make_project("file")
    project.write("script.py", DJANGO + textwrap.dedent(script))
    done = project.run("script.py")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.strip().splitlines()[-1]
    for words in told:
        assert words in last, done.stderr
    assert "script.py" in done.stderr  # the line to mend is in the traceback
    project.untouched()


def test_the_same_lines_with_an_f_run(make_project):
    project = make_project("file")
    made = project.run("manage.py", "migrate", "--run-syncdb", "--verbosity", "0")
    assert made.returncode == 0, made.stderr
    script, *_ = MISTAKES["a forgotten f"]
    project.write("script.py", DJANGO + textwrap.dedent(script).replace('"import:{pk}"', 'f"import:{pk}"'))
    done = project.run("script.py")
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    listed = project.run("manage.py", "locks", "list")
    assert "import:7" in listed.stdout
    assert "{" not in listed.stdout
