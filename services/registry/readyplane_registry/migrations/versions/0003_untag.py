"""A tag may point nowhere: it was taken away, its history stays and its versions go on."""

from alembic import op

revision = "registry_0003"
down_revision = "registry_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("tags", "tag_history"):
        op.execute(f"ALTER TABLE {table} ALTER COLUMN digest DROP NOT NULL")


def downgrade() -> None:
    message = "tags that were taken away can't be told by the version before; restore a backup"
    raise NotImplementedError(message)
