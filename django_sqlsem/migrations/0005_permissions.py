from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [('sqlsem', '0004_procedures')]

    operations = [
        migrations.AlterModelOptions(
            name='semaphorerow',
            options={
                'default_permissions': ('view',),
                'permissions': [
                    ('stop_semaphorerow', 'Can ask holders to stop'),
                    ('revoke_semaphorerow', 'Can revoke permits and purge stale slots'),
                    ('configure_semaphorerow', 'Can set slots, pause and resume'),
                ],
                'verbose_name': 'lock',
                'verbose_name_plural': 'locks',
            },
        ),
    ]
