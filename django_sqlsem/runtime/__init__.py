"""One acquisition's life in this process."""

from __future__ import annotations
