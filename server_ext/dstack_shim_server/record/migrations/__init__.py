"""Alembic's folder: the history of our tables, separate from dstack's."""
