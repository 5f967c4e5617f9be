"""Signatures and events beside manifests, which blobs each names, and what collection needs to know."""

from alembic import op

revision = "registry_0002"
down_revision = "registry_0001"
branch_labels = None
depends_on = None

# A key's id is its content too: nobody can store a signature under another key's name.
SIGNATURES = """
CREATE TABLE manifest_signatures (
    digest       text NOT NULL REFERENCES manifests (digest),
    key_id       text NOT NULL,
    public_key   bytea NOT NULL,
    envelope     text NOT NULL,
    create_time  timestamptz NOT NULL,
    PRIMARY KEY (digest, key_id),
    CONSTRAINT manifest_signatures_key_is_content
        CHECK (key_id = 'ed25519:' || encode(sha256(public_key), 'hex'))
)
"""
EVENTS = """
CREATE TABLE manifest_events (
    digest       text NOT NULL REFERENCES manifests (digest),
    version      integer NOT NULL CHECK (version > 0),
    event        text NOT NULL CHECK (event IN ('origin', 'retired', 'restored')),
    detail       text NOT NULL,
    create_time  timestamptz NOT NULL,
    PRIMARY KEY (digest, version)
)
"""
# Filled by the database from the document itself, so that no program can forget a reference.
BLOBS = """
CREATE TABLE manifest_blobs (
    sha256  text NOT NULL,
    digest  text NOT NULL REFERENCES manifests (digest),
    PRIMARY KEY (sha256, digest)
)
"""
NAMED = """
    SELECT DISTINCT file ->> 'sha256', {digest}
    FROM {source} json_array_elements(convert_from({document}, 'UTF8')::json -> 'files') AS file
"""
NOTE_BLOBS = f"""
CREATE FUNCTION readyplane_registry_note_blobs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO manifest_blobs (sha256, digest)
    {NAMED.format(digest="NEW.digest", source="", document="NEW.document")};
    RETURN NULL;
END
$$
"""
HOLDS = """
CREATE TABLE upload_holds (
    upload_id    text NOT NULL,
    sha256       text NOT NULL,
    expire_time  timestamptz NOT NULL,
    PRIMARY KEY (upload_id, sha256)
)
"""
EVICTIONS = """
CREATE TABLE blob_evictions (
    sha256       text PRIMARY KEY,
    size_bytes   bigint NOT NULL CHECK (size_bytes >= 0),
    attempts     integer NOT NULL DEFAULT 0,
    last_error   text NOT NULL DEFAULT '',
    create_time  timestamptz NOT NULL DEFAULT now()
)
"""
USES = """
CREATE TABLE manifest_uses (
    digest    text PRIMARY KEY REFERENCES manifests (digest),
    use_time  timestamptz NOT NULL
)
"""


def upgrade() -> None:
    for statement in (SIGNATURES, EVENTS, BLOBS, NOTE_BLOBS, HOLDS, EVICTIONS, USES):
        op.execute(statement)
    named = NAMED.format(digest="m.digest", source="manifests AS m,", document="m.document")
    op.execute(f"INSERT INTO manifest_blobs (sha256, digest) {named}")
    op.execute(
        "CREATE TRIGGER manifests_note_blobs AFTER INSERT ON manifests "
        "FOR EACH ROW EXECUTE FUNCTION readyplane_registry_note_blobs()"
    )
    op.execute("CREATE INDEX manifest_blobs_by_manifest ON manifest_blobs (digest)")
    op.execute("CREATE INDEX upload_holds_by_blob ON upload_holds (sha256)")
    op.execute("CREATE INDEX upload_holds_by_end ON upload_holds (expire_time)")
    op.execute("CREATE INDEX tag_history_by_digest ON tag_history (digest)")
    for table in ("manifest_signatures", "manifest_events", "manifest_blobs"):
        op.execute(
            f"CREATE TRIGGER {table}_rows BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION readyplane_registry_immutable()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_whole BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION readyplane_registry_immutable()"
        )


def downgrade() -> None:
    message = "signatures and events are never taken back; restore a backup instead"
    raise NotImplementedError(message)
