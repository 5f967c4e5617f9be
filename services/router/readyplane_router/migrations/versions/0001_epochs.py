"""The sequence of fencing epochs."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE SEQUENCE router_epochs AS bigint START 1")


def downgrade() -> None:
    op.execute("DROP SEQUENCE router_epochs")
