from __future__ import annotations

import uuid

from django.db import models


class Probe(models.Model):
    """The outside counter: how many are in at once, the most that ever were, and how many came in all."""

    name = models.CharField(max_length=100, primary_key=True)
    inside = models.IntegerField(default=0)
    peak = models.IntegerField(default=0)
    entered = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.inside} in, {self.peak} at most, {self.entered} in all"


class Warehouse(models.Model):
    """Where inventories are."""

    name = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.name


class Inventory(models.Model):
    """The header of the article on status columns; ``worked`` is counted up by whoever calculates it."""

    status = models.CharField(max_length=20, default="Not Started")
    priority = models.IntegerField(default=0)
    warehouse = models.ForeignKey(Warehouse, models.CASCADE, null=True)
    worked = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.pk}: {self.status}"


class CountedInventory(Inventory):
    """A table of its own whose status is in its parent's."""

    shelves = models.IntegerField(default=0)


class Stage(models.IntegerChoices):
    """Statuses that are numbers."""

    WAITING = 0
    RUNNING = 1
    DONE = 2


class VisibleManager(models.Manager["Job"]):
    """Leaves out what is hidden."""

    def get_queryset(self) -> models.QuerySet[Job]:
        """Return the visible rows."""
        return super().get_queryset().filter(hidden=False)


class Job(models.Model):
    """A model like others make them: keys, columns and managers of its own."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, db_column="job_key")
    stage = models.IntegerField(choices=Stage.choices, default=Stage.WAITING, db_column="stage_no")
    outcome = models.CharField(max_length=10, null=True)
    urgent = models.BooleanField(default=False)
    hidden = models.BooleanField(default=False)

    objects = VisibleManager()

    class Meta:
        base_manager_name = "objects"

    def __str__(self) -> str:
        return f"{self.pk}: {self.stage}"
