"""The doctor's child that takes a slot and is killed: ``python -m django_sqlsem.doctor.victim ALIAS NAME LEASE``."""

from __future__ import annotations

import sys


def main() -> None:
    """Take the slot, say so, and hold it until the end of the input, which comes if the doctor dies first."""
    import django

    django.setup()
    from django_sqlsem import mutex

    alias, name, lease = sys.argv[1:4]
    with mutex(name, timeout=20, lease=float(lease), using=alias):
        sys.stdout.write("held\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
