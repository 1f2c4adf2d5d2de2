from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('sqlsem', '0004_modes'),
    ]

    operations = [
        migrations.AddField(
            model_name='semaphorerow',
            name='tokens',
            field=models.BigIntegerField(null=True, verbose_name='tokens'),
        ),
    ]
