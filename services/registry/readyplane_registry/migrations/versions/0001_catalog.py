"""Manifests that cannot change, tags that move by compare-and-set, and the history of each tag."""

from alembic import op

revision = "registry_0001"
down_revision = None
branch_labels = None
depends_on = None

# The database computes the digest anew: no program can store a document under a name not its own.
MANIFESTS = """
CREATE TABLE manifests (
    sequence      bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    digest        text PRIMARY KEY,
    document      bytea NOT NULL,
    kind          text NOT NULL,
    model         text NOT NULL,
    size_bytes    bigint NOT NULL CHECK (size_bytes >= 0),
    file_count    integer NOT NULL CHECK (file_count > 0),
    tensor_count  integer NOT NULL CHECK (tensor_count >= 0),
    create_time   timestamptz NOT NULL,
    CONSTRAINT manifests_digest_is_content
        CHECK (digest = 'sha256:' || encode(sha256(document), 'hex'))
)
"""
TAGS = """
CREATE TABLE tags (
    name         text PRIMARY KEY CHECK (name <> ''),
    digest       text NOT NULL REFERENCES manifests (digest),
    version      bigint NOT NULL CHECK (version > 0),
    change       bigint NOT NULL UNIQUE,
    create_time  timestamptz NOT NULL,
    FOREIGN KEY (name, version) REFERENCES tag_history (name, version)
)
"""
TAG_HISTORY = """
CREATE TABLE tag_history (
    name         text NOT NULL,
    version      bigint NOT NULL CHECK (version > 0),
    digest       text NOT NULL REFERENCES manifests (digest),
    create_time  timestamptz NOT NULL,
    PRIMARY KEY (name, version)
)
"""
REFUSE = """
CREATE FUNCTION readyplane_registry_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows never change', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$
"""
# A tag moves one version at a time, keeps its name, and is never taken away.
TAG_MOVE = """
CREATE FUNCTION readyplane_registry_tag_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.name <> OLD.name OR NEW.version <> OLD.version + 1 THEN
        RAISE EXCEPTION 'tag % may only move on by one version', OLD.name
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$
"""


def upgrade() -> None:
    for statement in (MANIFESTS, TAG_HISTORY, TAGS, REFUSE, TAG_MOVE):
        op.execute(statement)
    op.execute("CREATE SEQUENCE tag_changes OWNED BY tags.change")
    op.execute("CREATE INDEX manifests_by_model ON manifests (model, kind, sequence DESC)")
    op.execute("CREATE INDEX tags_by_digest ON tags (digest)")
    for table in ("manifests", "tag_history"):
        op.execute(
            f"CREATE TRIGGER {table}_rows BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION readyplane_registry_immutable()"
        )
    for table in ("manifests", "tag_history", "tags"):
        op.execute(
            f"CREATE TRIGGER {table}_whole BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION readyplane_registry_immutable()"
        )
    op.execute(
        "CREATE TRIGGER tags_stay BEFORE DELETE ON tags "
        "FOR EACH ROW EXECUTE FUNCTION readyplane_registry_immutable()"
    )
    op.execute(
        "CREATE TRIGGER tags_move BEFORE UPDATE ON tags "
        "FOR EACH ROW EXECUTE FUNCTION readyplane_registry_tag_move()"
    )


def downgrade() -> None:
    message = "manifests are immutable; restore a backup instead"
    raise NotImplementedError(message)
