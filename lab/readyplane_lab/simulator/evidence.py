"""What a simulated worker tells of itself to the gate: its serving facts and the evidence of its checks.

Owns what a modelled engine would have told; the production gate judges it.
"""

from __future__ import annotations

from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.identity import KvFormat, Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.stage import CapacityStage
from readyplane.core.startup import WeightTier
from readyplane.core.worker import CheckResult, Serving
from readyplane.ports import Order
from readyplane_lab.simulator.engine import SimEngine


def serving_of(
    order: Order,
    manifest: Manifest,
    engine: SimEngine,
    *,
    engine_url: str,
    profile: ClassProfile,
    tier: WeightTier,
    stage: CapacityStage | None,
) -> Serving:
    """What it serves; `profile`: the one the router is told. `stage`: of its graphs, None for whole."""
    size = engine.model.block_size
    blocks = engine.model.pool.total if stage is None else stage.kv_tokens // size
    return Serving(
        engine_url=engine_url,
        kv=KvFormat(manifest.digest, block_size=size),
        kv_total_blocks=blocks,
        block_size=size,
        max_model_len=int(manifest.config["max_model_len"]),
        profile=profile.name,
        max_num_seqs=engine.model.max_num_seqs,
        tokenizer_digest=manifest.tokenizer_digest,
        tier=tier,
        mode=order.mode,
        flips=True,
        stage=stage,
    )


def checks_of(
    manifest: Manifest | None,
    *,
    blocks: int,
    profile: ClassProfile,
    epoch: int,
    group_epoch: int,
) -> tuple[CheckResult, ...]:
    """Evidence of a start on which everything went well.

    Args:
        manifest: what was loaded; None of an attached engine, which nobody saw loading anything.
        blocks: the KV that it serves with.
    """
    evidence: dict[str, dict[str, Any]] = {
        **(_nothing_seen() if manifest is None else _loaded(manifest)),
        gc.KV_CONNECTOR: {"outbound": True, "inbound": True, "detail": "modelled"},
        gc.BASICS: {
            "eos": True,
            "max_tokens": True,
            "structured": gc.NOT_OFFERED,
            "sampling": gc.NOT_OFFERED,
            "quantisation": gc.NOT_TOLD,
            "kv_dtype": gc.NOT_TOLD,
        },
        gc.KV_POOL: {"kv_total_blocks": blocks, "free_blocks": blocks},
        # Prompts have no tokens here: engines and router are given the same hashes.
        gc.KV_HASHES: {"token_ids": [], "block_size": 0, "told": []},
        gc.PROFILE: {"name": profile.name, "digest": profile.digest},
        gc.LEASE: {"epoch": epoch},
        gc.GROUP: {"group_epoch": group_epoch},
    }
    return tuple(CheckResult(name, passed=True, evidence=e) for name, e in evidence.items())


def _loaded(manifest: Manifest) -> dict[str, dict[str, Any]]:
    golden = manifest.canary.golden_token_ids if manifest.canary else ()
    chunks = sum(len(f.chunks) for f in manifest.files)
    return {
        gc.MODEL_REVISION: {"manifest_digest": manifest.digest},
        gc.TOKENIZER_REVISION: {"tokenizer_digest": manifest.tokenizer_digest},
        gc.TENSOR_CHECKSUMS: {"chunks_verified": chunks, "chunks_total": chunks, "failed": []},
        gc.SHARD_COVERAGE: {
            "tensors": len(manifest.tensors),
            "tensors_expected": len(manifest.tensors),
            "missing": [],
            "ranks": manifest.tp,
            "rank_tensors": [len(manifest.tensors)] * manifest.tp,
        },
        gc.CANARY: {"token_ids": list(golden), "eos_ok": True, "sampling_ok": True},
    }


def _nothing_seen() -> dict[str, dict[str, Any]]:
    """Without a known answer, one that repeats has to do."""
    answer = {"token_ids": [1], "repeat_token_ids": [1], "eos_ok": True, "sampling_ok": True}
    skipped = sorted(gc.ATTACHED_MAY_SKIP - {gc.KV_CONNECTOR})
    return {**{c: {gc.NOT_APPLICABLE: "already running"} for c in skipped}, gc.CANARY: answer}
