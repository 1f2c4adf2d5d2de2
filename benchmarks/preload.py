"""What the fork server imports once, so that each measured process starts in a few milliseconds."""

from __future__ import annotations

import django

from benchmarks.contenders import all_contenders

django.setup()
all_contenders()
