"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

RESTARTS = "shim_restart_restarts"


def upgrade() -> None:
    """Make them."""
    _make_instances()
    _make_restarts()
    _make_what_holds_for_all()


def downgrade() -> None:
    """Drop them."""
    for name in ("replicas", "rollout", "stops", "restarts", "instances"):
        op.drop_table(f"shim_restart_{name}")


def _make_instances() -> None:
    table = "shim_restart_instances"
    op.create_table(
        table,
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("project", sa.String(128), nullable=False),
        sa.Column("fleet", sa.String(128), nullable=False),
        sa.Column("running_version", sa.String(128), nullable=False),
        sa.Column("running_features", sa.Text()),
        sa.Column("implementation", sa.Text(), nullable=False),
        sa.Column("installed_version", sa.String(128), nullable=False),
        sa.Column("installed_status", sa.String(32), nullable=False),
        sa.Column("installed_features", sa.Text()),
        sa.Column("wanted_version", sa.String(128), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("answer", sa.Integer()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("blocking", sa.Text(), nullable=False),
        sa.Column("tasks", sa.Text()),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("reason_since", sa.Float(), nullable=False),
    )
    op.create_index(f"ix_{table}_name", table, ["name"])
    op.create_index(f"ix_{table}_seen_at", table, ["seen_at"])


def _make_restarts() -> None:
    op.create_table(
        RESTARTS,
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("instance_id", sa.String(64), nullable=False),
        sa.Column("instance", sa.String(128), nullable=False),
        sa.Column("fleet", sa.String(128), nullable=False),
        sa.Column("from_version", sa.String(128), nullable=False),
        sa.Column("to_version", sa.String(128), nullable=False),
        sa.Column("requested_at", sa.Float(), nullable=False),
        sa.Column("replica", sa.String(128), nullable=False),
        sa.Column("process", sa.String(128), nullable=False),
        sa.Column("tasks_before", sa.Text(), nullable=False),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("returned_at", sa.Float()),
        sa.Column("absence", sa.Float()),
        sa.Column("tasks_after", sa.Text()),
        sa.Column("outcome", sa.String(32)),
        sa.Column("outcome_at", sa.Float()),
        sa.Column("why", sa.Text(), nullable=False),
    )
    op.create_index(f"ix_{RESTARTS}_instance_id", RESTARTS, ["instance_id"])
    op.create_index(f"ix_{RESTARTS}_requested_at", RESTARTS, ["requested_at"])
    still_open = sa.text("outcome IS NULL")
    op.create_index(
        "shim_restart_one_open_restart",
        RESTARTS,
        ["instance_id"],
        unique=True,
        sqlite_where=still_open,
        postgresql_where=still_open,
    )
    op.create_index("shim_restart_restarts_by_version", RESTARTS, ["to_version", "outcome"])


def _make_what_holds_for_all() -> None:
    op.create_table(
        "shim_restart_stops",
        sa.Column("version", sa.String(128), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("restart_id", sa.String(36), nullable=False),
        sa.Column("lifted_at", sa.Float()),
        sa.Column("lifted_by", sa.String(128), nullable=False),
    )
    rollout = op.create_table(
        "shim_restart_rollout",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("claims", sa.Integer(), nullable=False),
        sa.Column("paused_at", sa.Float()),
        sa.Column("paused_by", sa.String(128), nullable=False),
        sa.Column("choice", sa.Text(), nullable=False),
        sa.Column("choice_at", sa.Float(), nullable=False),
        sa.Column("choice_by", sa.String(128), nullable=False),
    )
    op.create_table(
        "shim_restart_replicas",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("began_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
    )
    # The one row everything locks: here, where nobody else can be making it.
    row = {"id": 1, "claims": 0, "paused_by": "", "choice": "", "choice_at": 0.0, "choice_by": ""}
    op.bulk_insert(rollout, [row])
