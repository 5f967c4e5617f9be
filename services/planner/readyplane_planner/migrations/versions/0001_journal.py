"""Decisions that are only added, what came of them, policy versions, and the leader's number."""

from alembic import op

revision = "planner_0001"
down_revision = None
branch_labels = None
depends_on = None

DECISIONS = """
CREATE TABLE decisions (
    sequence        bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    decision_id     text PRIMARY KEY CHECK (decision_id <> ''),
    model           text NOT NULL,
    create_time     timestamptz NOT NULL,
    changed         boolean NOT NULL,
    summary         text NOT NULL,
    policy_version  bigint NOT NULL,
    document        jsonb NOT NULL,
    inputs          bytea NOT NULL
)
"""
# One row for each thing that happened to one worker of a decision; the first telling stays.
OUTCOMES = """
CREATE TABLE decision_outcomes (
    sequence     bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    decision_id  text NOT NULL,
    subject      text NOT NULL,
    kind         text NOT NULL,
    model        text NOT NULL,
    create_time  timestamptz NOT NULL,
    document     jsonb NOT NULL,
    PRIMARY KEY (decision_id, subject, kind)
)
"""
POLICIES = """
CREATE TABLE policies (
    model        text NOT NULL CHECK (model <> ''),
    version      bigint NOT NULL CHECK (version > 0),
    document     jsonb NOT NULL,
    create_time  timestamptz NOT NULL,
    PRIMARY KEY (model, version)
)
"""
REFUSE = """
CREATE FUNCTION readyplane_planner_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows never change', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$
"""


def upgrade() -> None:
    op.execute(DECISIONS)
    op.execute("CREATE INDEX decisions_by_model ON decisions (model, sequence DESC)")
    op.execute("CREATE INDEX decisions_changed ON decisions (model, sequence DESC) WHERE changed")
    op.execute(OUTCOMES)
    op.execute("CREATE INDEX outcomes_by_kind ON decision_outcomes (model, kind, sequence DESC)")
    op.execute(POLICIES)
    op.execute("CREATE SEQUENCE planner_epochs")
    op.execute(REFUSE)
    for table in ("decisions", "decision_outcomes", "policies"):
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table}"
            " FOR EACH ROW EXECUTE FUNCTION readyplane_planner_append_only()"
        )


def downgrade() -> None:
    for table in ("policies", "decision_outcomes", "decisions"):
        op.execute(f"DROP TABLE {table}")
    op.execute("DROP FUNCTION readyplane_planner_append_only")
    op.execute("DROP SEQUENCE planner_epochs")
