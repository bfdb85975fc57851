"""Databases as a dstack server leaves them, as far as the record meets them: SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.eventually import eventually

OF_DSTACK = (
    "CREATE TABLE projects (id VARCHAR(36) PRIMARY KEY, name VARCHAR(50))",
    "CREATE TABLE fleets (id VARCHAR(36) PRIMARY KEY, name VARCHAR(100), project_id VARCHAR(36))",
    "INSERT INTO projects VALUES ('p1', 'main')",
    "INSERT INTO fleets VALUES ('f1', 'gpu', 'p1'), ('f2', 'cpu', 'p1')",
)


@attrs.frozen
class Database:
    """A database and a way to look into it beside the code under test."""

    url: str

    def ask(self, query: str, *, alone: bool = False, **values: Any) -> list[dict[str, Any]]:
        """Run a statement in a transaction, or ``alone`` outside any; rows if it has any."""
        return asyncio.run(_ask(self.url, query, values, alone))


async def _ask(url: str, query: str, values: dict[str, Any], alone: bool) -> list[dict[str, Any]]:
    options = {"isolation_level": "AUTOCOMMIT"} if alone else {}
    engine = create_async_engine(url, poolclass=NullPool, **options)
    try:
        async with engine.begin() as connection:
            found = await connection.execute(text(query), values)
            return [dict(row) for row in found.mappings()] if found.returns_rows else []
    finally:
        await engine.dispose()


def make_sqlite(folder: Path) -> Database:
    """A file as the server leaves it, in WAL mode."""
    file = folder / "sqlite.db"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA journal_mode=WAL")
    for statement in OF_DSTACK:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return Database(f"sqlite+aiosqlite:///{file}")


@attrs.define
class Postgres:
    """A server of its own, reached by a socket; each test has a database in it."""

    folder: Path
    user: str
    made: int = 0

    def make(self) -> Database:
        """Another database with dstack's tables."""
        self.made += 1
        self.database("postgres").ask(f"CREATE DATABASE test{self.made}", alone=True)
        database = self.database(f"test{self.made}")
        for statement in OF_DSTACK:
            database.ask(statement)
        return database

    def database(self, name: str) -> Database:
        """A database by its name."""
        return Database(f"postgresql+asyncpg://{self.user}@/{name}?host={self.folder}")


def why_no_postgres() -> str:
    """Why there is no PostgreSQL here, "" if there is."""
    if _program("postgres") is None:
        return "no PostgreSQL here (Debian package postgresql)"
    if os.geteuid() == 0 and not _has_user("postgres"):
        return "PostgreSQL refuses to run as root, and there is no user postgres"
    return ""


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of our own in a folder of its own; nothing of one that is installed is touched."""
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        _run("initdb", "--no-sync", "--auth=trust", "--username=dstack", "-D", data, user=user)
        server = subprocess.Popen(
            [
                _program("postgres") or "",
                "-D",
                data,
                "-F",
                "-k",
                folder,
                "-c",
                "listen_addresses=",
            ],
            user=user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            running = Postgres(folder, "dstack")
            eventually(lambda: _answers(running), within=30, saying="PostgreSQL answers")
            yield running
        finally:
            server.terminate()  # SIGTERM waits for clients, of which the tests have none left
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _answers(running: Postgres) -> bool:
    try:
        running.database("postgres").ask("SELECT 1")
    except Exception:  # noqa: BLE001  whatever the driver raises until the server is up
        return False
    return True


def _run(program: str, *arguments: object, user: str | None) -> None:
    command = [_program(program) or program, *map(str, arguments)]
    subprocess.run(command, user=user, check=True, capture_output=True, timeout=60)


def _program(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
