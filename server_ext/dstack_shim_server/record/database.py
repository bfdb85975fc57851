"""
The server's database: where it is, and engines of our own for it.

The server's own engine belongs to its event loop, and only async drivers are installed there.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from dstack_shim_server.errors import RecordUnusable

# Seconds to wait for another writer (SQLite) or for a lock (PostgreSQL) before giving up for now.
LOCK_TIMEOUT = 2.0
CONNECT_TIMEOUT = 2.0


def database_url(environment: Mapping[str, str]) -> str:
    """Return the URL of the server's database as the server itself finds it."""
    given = environment.get("DSTACK_DATABASE_URL")
    if given is not None:
        return given
    folder = environment.get("DSTACK_SERVER_DIR")
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111  no Path yet
    server = Path(folder) if folder is not None else Path(home) / ".dstack" / "server"
    return f"sqlite+aiosqlite:///{server.resolve()}/data/sqlite.db"


def shown(url: str) -> str:
    """Return a URL fit for people: without its password."""
    return make_url(url).render_as_string(hide_password=True)


def without_secrets(text: str, url: str) -> str:
    """Take the password of a URL out of a driver's message."""
    password = make_url(url).password
    return text.replace(password, "***") if password else text


def open_engine(url: str, *, writing: bool = True) -> AsyncEngine:
    """Return an engine for `url`; nothing is connected before it is used."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed, writing)
    return _open_postgresql(parsed)


def require_there(url: str) -> None:
    """
    Raise RecordUnusable if a SQLite file is not there: the server makes it, never we.

    Asked before a connection is tried: the driver's thread of one that failed outlives it.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise RecordUnusable(f"there is no database {parsed.database}")


def _open_postgresql(url: URL) -> AsyncEngine:
    engine = create_async_engine(
        url,
        pool_size=2,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"timeout": CONNECT_TIMEOUT, "command_timeout": 3 * LOCK_TIMEOUT},
    )

    # Not as a parameter of the connection: poolers between refuse those they do not know.
    @event.listens_for(engine.sync_engine, "begin")
    def _begun(connection: Any) -> None:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT:.0f}s'")

    return engine


def _open_sqlite(url: URL, writing: bool) -> AsyncEngine:
    # No pool: an idle connection would be a thread that keeps the server's process from ending.
    engine = create_async_engine(
        _existing_file(url), poolclass=NullPool, connect_args={"timeout": LOCK_TIMEOUT}
    )
    sync = engine.sync_engine

    # Python's own handling of transactions begins none for DDL and takes the write lock late, where
    # waiting for it is no longer possible; so it is told to keep out and we begin ourselves.
    @event.listens_for(sync, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(sync, "begin")
    def _begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


def _existing_file(url: URL) -> URL:
    """Make a URL that opens a file and never makes one."""
    escaped = re.sub(r"[%?#]", lambda found: f"%{ord(found[0]):02X}", url.database or "")
    return url.set(database=f"file:{escaped}").update_query_dict({"mode": "rw", "uri": "true"})
