"""Values that need neither Django models nor a database: names, durations, clocks, identity, modes."""

from __future__ import annotations
