"""Benchmarks: the locks of this package, their peers and raw floors, measured in one run on one machine.

``python -m benchmarks --help`` says how to run them, docs/benchmarks.md what they measure.
"""

from __future__ import annotations

from typing import Final

#: The variable of the environment that has the databases of a run, as JSON of Django's ``DATABASES``.
ENVIRONMENT: Final = "SQLSEM_BENCH_DATABASES"
#: Ends the names of aliases that are the same databases with ``RECORD=False``.
UNRECORDED: Final = "_unrecorded"
#: Ends the names of aliases that are the same databases with ``HISTORY=False``.
SILENT: Final = "_silent"
