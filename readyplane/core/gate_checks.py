"""The names of the ready gate's checks (R18.1) and the evidence each must carry.

The agent produces them, the router's gate judges the evidence itself; `passed` alone convinces
nobody. A check that cannot be made on an attached engine is sent as passed with the single field
`NOT_APPLICABLE` and the reason in words; only the checks of `ATTACHED_MAY_SKIP` may be.
"""

from __future__ import annotations

MODEL_REVISION = "model_revision"
TOKENIZER_REVISION = "tokenizer_revision"
TENSOR_CHECKSUMS = "tensor_checksums"
SHARD_COVERAGE = "shard_coverage"
KV_CONNECTOR = "kv_connector"
CANARY = "canary"
BASICS = "basics"
KV_POOL = "kv_pool"
KV_HASHES = "kv_hashes"
PROFILE = "profile"
LEASE = "lease"
GROUP = "group"

# Name of the check, and the evidence fields that must be there.
#
# model_revision      manifest_digest: what the engine was really given
# tokenizer_revision  tokenizer_digest ("" when the artifact has none)
#                     also, where the engine was asked: text_token_ids, wanted_token_ids,
#                     round_trip: what it makes of a text
# tensor_checksums    chunks_verified, chunks_total, failed (names of what did not match)
# shard_coverage      tensors, tensors_expected, missing (names), ranks; of several ranks also
#                     rank_tensors: how many each holds, whole or in part
# kv_connector        outbound, inbound: true when reached, detail in words
# canary              token_ids (the answer), eos_ok, sampling_ok; an attached engine adds
#                     repeat_token_ids: the same question asked again
# basics              eos, max_tokens: true; structured, sampling (a seeded answer repeats): true
#                     or "not offered"; quantisation, kv_dtype: as the engine says, or "not told"
# kv_pool             kv_total_blocks, free_blocks (after the canary); wanted_blocks where the size
#                     was ordered and not measured
# kv_hashes           token_ids (a prompt that was computed), block_size, told: the hashes of its
#                     blocks as the worker's KV events name them (decimal), empty when none came
# profile             name, digest; document (the profile itself) where the router may not have it
# lease               epoch
# group               group_epoch
GATE_CHECKS: dict[str, tuple[str, ...]] = {
    MODEL_REVISION: ("manifest_digest",),
    TOKENIZER_REVISION: ("tokenizer_digest",),
    TENSOR_CHECKSUMS: ("chunks_verified", "chunks_total", "failed"),
    SHARD_COVERAGE: ("tensors", "tensors_expected", "missing", "ranks"),
    KV_CONNECTOR: ("outbound", "inbound", "detail"),
    CANARY: ("token_ids", "eos_ok", "sampling_ok"),
    BASICS: ("eos", "max_tokens", "structured", "sampling", "quantisation", "kv_dtype"),
    KV_POOL: ("kv_total_blocks", "free_blocks"),
    KV_HASHES: ("token_ids", "block_size", "told"),
    PROFILE: ("name", "digest"),
    LEASE: ("epoch",),
    GROUP: ("group_epoch",),
}

GRAPH_STAGE = "graph_stage"
"""Of an upgrade while the worker serves (R14), not of a start: `answers`, each with the tokens that a
question got `before` and `after`; `shapes` that were captured; `kv_total_blocks` that are left."""
GRAPH_STAGE_FIELDS = ("answers", "shapes", "kv_total_blocks")

NOT_APPLICABLE = "not_applicable"
NOT_OFFERED = "not offered"
NOT_TOLD = "not told"
# What engines call the KV format that follows from the model.
KV_DTYPE_AUTO = "auto"
KV_DTYPE_UNKNOWN = "unknown"
# Of the KV blocks that were ordered: engines round.
KV_BLOCKS_SHARE_MIN = 0.95

# What cannot be checked on an engine that was already running: nobody saw its bytes being loaded.
ATTACHED_MAY_SKIP = frozenset(
    {MODEL_REVISION, TOKENIZER_REVISION, TENSOR_CHECKSUMS, SHARD_COVERAGE, KV_CONNECTOR}
)
