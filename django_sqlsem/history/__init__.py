"""What has happened to each name: recorded beside the work, written in batches, read by operators.

Nothing here grants a lock or keeps one, and no failure here is a permit's. This package must not import the models
before Django is ready: ``reading``, ``writing`` and ``acts`` are imported where they are first needed.
"""

from __future__ import annotations
