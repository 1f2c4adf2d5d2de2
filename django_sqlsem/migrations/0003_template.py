from django.db import migrations, models

from django_sqlsem.models.fields import ExactCharField

TEMPLATE = {"blank": True, "db_default": "", "default": "", "max_length": 200, "verbose_name": "template"}


class Migration(migrations.Migration):
    dependencies = [("sqlsem", "0002_pause")]

    operations = [
        migrations.AddField("semaphorerow", "template", ExactCharField(**TEMPLATE)),
        migrations.AddIndex(
            "semaphorerow", models.Index(fields=["template", "name", "kind"], name="sqlsem_semaphore_template")
        ),
        migrations.AddField("minuterow", "template", ExactCharField(**TEMPLATE)),
        migrations.AddIndex("minuterow", models.Index(fields=["template", "minute_us"], name="sqlsem_minute_template")),
    ]
