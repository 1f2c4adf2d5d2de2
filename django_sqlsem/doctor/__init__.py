"""What ``manage.py locks doctor`` finds: it connects, measures, tries, and says so in plain words."""

from __future__ import annotations
