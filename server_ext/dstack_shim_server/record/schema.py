"""Our tables' version: made at load, whoever comes first, and watched while we write."""

import functools
import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from dstack_shim_server.errors import RecordUnusable
from dstack_shim_server.record.tables import VERSION_TABLE

MIGRATIONS = Path(__file__).with_name("migrations")

# Any number that nobody else takes: replicas that load at once make the tables one after the other.
_LOCK_KEY = 7402511806
# Alembic keeps what it works on in module variables.
_alembic = threading.Lock()


async def ensure(engine: AsyncEngine) -> None:
    """Bring our tables to this code's version. Raises RecordUnusable if they are newer."""
    async with engine.begin() as connection:
        if await _is_current(connection):
            return
    async with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})"))
        # Asked again: whoever held the lock has made them.
        if not await _is_current(connection):
            await connection.run_sync(_upgrade)


async def require_current(connection: AsyncConnection) -> None:
    """Raise RecordUnusable unless our tables are of this code's version."""
    if not await _is_current(connection):
        raise RecordUnusable("the record's tables are not there, or of an older version")


async def _is_current(connection: AsyncConnection) -> bool:
    found = await connection.run_sync(_version)
    if found == newest():
        return True
    if found is not None and found not in _known():
        raise RecordUnusable(
            f"the record's tables are of version {found}, newer than this code's {newest()}"
        )
    return False


@functools.cache
def newest() -> str:
    """Return the version this code knows."""
    return str(_scripts().get_current_head())


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(script.revision for script in _scripts().walk_revisions())


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608


def _upgrade(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, "head")


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config
