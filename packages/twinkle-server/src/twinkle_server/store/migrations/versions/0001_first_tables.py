"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes them."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("label", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("revoked_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_tenant"), "api_keys", ["tenant"], unique=False)
    op.create_table(
        "audit_log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=500), nullable=False),
        sa.Column("request_id", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_at"), "audit_log", ["at"], unique=False)
    op.create_table(
        "futures",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("queue", sa.String(length=250), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=True),
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("dedup", sa.String(length=250), nullable=True),
        sa.Column("request_id", sa.String(length=200), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("payload_digest", sa.String(length=64), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("media_type", sa.String(length=100), nullable=True),
        sa.Column("error_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("started_at", sa.Float(precision=53), nullable=True),
        sa.Column("finished_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_futures")),
        sa.UniqueConstraint("id", name=op.f("uq_futures_id")),
        sa.UniqueConstraint("tenant", "dedup", name=op.f("uq_futures_tenant_dedup")),
    )
    op.create_index(op.f("ix_futures_finished_at"), "futures", ["finished_at"], unique=False)
    op.create_index(op.f("ix_futures_run_id"), "futures", ["run_id"], unique=False)
    op.create_index(op.f("ix_futures_status"), "futures", ["status"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("seen_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_tenant_created_at"), "sessions", ["tenant", "created_at"], unique=False)
    op.create_table(
        "runs",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("base_model", sa.String(length=200), nullable=False),
        sa.Column("adapter", sa.String(length=64), nullable=False),
        sa.Column("lora", sa.Text(), nullable=False),
        sa.Column("label", sa.String(length=200), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("setup", sa.Text(), nullable=False),
        sa.Column("parked", sa.String(length=64), nullable=True),
        sa.Column("dirty", sa.Boolean(), nullable=False),
        sa.Column("corrupted", sa.Boolean(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("next_seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("used_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_runs_session_id_sessions")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_runs")),
        sa.UniqueConstraint("adapter", name=op.f("uq_runs_adapter")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
    )
    op.create_index(op.f("ix_runs_session_id_name"), "runs", ["session_id", "name"], unique=False)
    op.create_index(op.f("ix_runs_tenant_number"), "runs", ["tenant", "number"], unique=False)
    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(length=160), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("base_model", sa.String(length=200), nullable=False),
        sa.Column("checkpoint", sa.String(length=500), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_sampling_sessions_session_id_sessions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sampling_sessions")),
    )
    op.create_index(op.f("ix_sampling_sessions_tenant"), "sampling_sessions", ["tenant"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("folder", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("resumable", sa.Boolean(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("expires_at", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("folder", name=op.f("uq_checkpoints_folder")),
        sa.UniqueConstraint("run_id", "kind", "name", name=op.f("uq_checkpoints_run_id_kind_name")),
    )
    op.create_index(op.f("ix_checkpoints_tenant_number"), "checkpoints", ["tenant", "number"], unique=False)
    op.create_table(
        "run_metrics",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=128), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("measured", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_metrics_run_id_runs")),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_run_metrics")),
    )
    op.create_index(op.f("ix_run_metrics_run_id_step"), "run_metrics", ["run_id", "step"], unique=False)


def downgrade() -> None:
    """Drops them."""
    for name in ("run_metrics", "checkpoints", "sampling_sessions", "runs", "sessions", "futures", "audit_log", "api_keys"):
        op.drop_table(name)
