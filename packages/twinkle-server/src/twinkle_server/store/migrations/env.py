"""Run by alembic, with the connection that `migrate` gave it."""

from alembic import context

from twinkle_server.store._tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=False)
with context.begin_transaction():
    context.run_migrations()
