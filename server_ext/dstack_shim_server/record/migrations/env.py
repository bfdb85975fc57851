"""Alembic's entry: upgrades over the connection it is given, in that connection's transaction."""

from alembic import context

from dstack_shim_server.record.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
