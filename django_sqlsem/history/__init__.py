"""What has happened to each name: recorded beside the work, written in batches, read by operators.

Nothing here grants a lock or keeps one, and no failure here is a permit's.
"""

from __future__ import annotations
