from django.db import migrations, models

import django_sqlsem.models.fields


class Migration(migrations.Migration):

    dependencies = [
        ('sqlsem', '0005_tokens'),
    ]

    operations = [
        migrations.CreateModel(
            name='TransactionLockRow',
            fields=[
                ('key', django_sqlsem.models.fields.ExactCharField(db_column='name_key', editable=False, max_length=32, primary_key=True, serialize=False, verbose_name='key')),
                ('name', django_sqlsem.models.fields.ExactCharField(max_length=200, verbose_name='name')),
                ('grants', models.BigIntegerField(default=0, verbose_name='grants')),
            ],
            options={
                'verbose_name': 'transaction lock',
                'verbose_name_plural': 'transaction locks',
                'db_table': 'sqlsem_transaction_lock',
                'default_permissions': ('view',),
            },
        ),
    ]
