"""The newest leader's number of each model: a record of an older one is refused."""

from alembic import op

revision = "planner_0002"
down_revision = "planner_0001"
branch_labels = None
depends_on = None

FENCES = """
CREATE TABLE planner_fences (
    model  text PRIMARY KEY CHECK (model <> ''),
    epoch  bigint NOT NULL CHECK (epoch > 0)
)
"""


def upgrade() -> None:
    op.execute(FENCES)


def downgrade() -> None:
    op.execute("DROP TABLE planner_fences")
