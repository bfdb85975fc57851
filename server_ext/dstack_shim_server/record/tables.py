"""
Our tables beside dstack's. Times are seconds since the epoch, lists and objects are JSON text.

`migrations` makes them; a test compares the two.
"""

from sqlalchemy import (
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

PREFIX = "shim_restart_"
VERSION_TABLE = f"{PREFIX}version"

metadata = MetaData()

instances = Table(
    f"{PREFIX}instances",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(128), nullable=False, index=True),
    Column("project", String(128), nullable=False),
    Column("fleet", String(128), nullable=False),
    Column("running_version", String(128), nullable=False),
    Column("running_features", Text),
    Column("implementation", Text, nullable=False),
    Column("installed_version", String(128), nullable=False),
    Column("installed_status", String(32), nullable=False),
    Column("installed_features", Text),
    Column("wanted_version", String(128), nullable=False),
    Column("state", String(32), nullable=False),
    Column("answer", Integer),
    Column("reason", Text, nullable=False),
    Column("blocking", Text, nullable=False),
    Column("tasks", Text),
    Column("seen_at", Float, nullable=False, index=True),
    Column("reason_since", Float, nullable=False),
)

restarts = Table(
    f"{PREFIX}restarts",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("instance_id", String(64), nullable=False, index=True),
    Column("instance", String(128), nullable=False),
    Column("fleet", String(128), nullable=False),
    Column("from_version", String(128), nullable=False),
    Column("to_version", String(128), nullable=False),
    Column("requested_at", Float, nullable=False, index=True),
    Column("replica", String(128), nullable=False),
    Column("process", String(128), nullable=False),
    Column("tasks_before", Text, nullable=False),
    Column("reasons", Text, nullable=False),
    Column("returned_at", Float),
    Column("absence", Float),
    Column("tasks_after", Text),
    Column("outcome", String(32)),
    Column("outcome_at", Float),
    Column("why", Text, nullable=False),
    # Whoever claims an instance takes this row: the database itself lets nobody else have one.
    Index(
        f"{PREFIX}one_open_restart",
        "instance_id",
        unique=True,
        sqlite_where=text("outcome IS NULL"),
        postgresql_where=text("outcome IS NULL"),
    ),
    Index(f"{PREFIX}restarts_by_version", "to_version", "outcome"),
)

stops = Table(
    f"{PREFIX}stops",
    metadata,
    Column("version", String(128), primary_key=True),
    Column("at", Float, nullable=False),
    Column("why", Text, nullable=False),
    Column("restart_id", String(36), nullable=False),
    # An operator said that it may go on; what failed before that does not count any more.
    Column("lifted_at", Float),
    Column("lifted_by", String(128), nullable=False),
)

# One row: what holds for the whole roll-out. Claims lock it, so that they see each other.
rollout = Table(
    f"{PREFIX}rollout",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("claims", Integer, nullable=False),
    Column("paused_at", Float),
    Column("paused_by", String(128), nullable=False),
    Column("choice", Text, nullable=False),
    Column("choice_at", Float, nullable=False),
    Column("choice_by", String(128), nullable=False),
)

# Server processes, so that the command line can tell with which settings they run.
replicas = Table(
    f"{PREFIX}replicas",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("began_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),
    Column("settings", Text, nullable=False),
)
