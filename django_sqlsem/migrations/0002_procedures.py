"""SQL Server: the stored procedures that take, give back and show application locks. Other databases have none."""

from django.db import migrations

from django_sqlsem.backends.applock import install


def create(apps, schema_editor):
    if schema_editor.connection.vendor == "microsoft":
        install.install(schema_editor.connection)


def remove(apps, schema_editor):
    if schema_editor.connection.vendor == "microsoft":
        install.remove(schema_editor.connection)


class Migration(migrations.Migration):
    # In a transaction an altered procedure would keep its callers out until the end, those who give back included.
    atomic = False

    dependencies = [("sqlsem", "0001_initial")]

    operations = [migrations.RunPython(create, remove)]
