"""What an engine is started with, from the agent's settings and the artifact."""

from __future__ import annotations

import json
import os
from pathlib import Path

from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane_agent.arena import Arena
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.ranks import RankSpec
from readyplane_agent.settings import AgentSettings


def own_engine(
    s: AgentSettings,
    manifest: Manifest,
    arena: Arena,
    *,
    engine_id: str,
    profile: ClassProfile,
    compiles: bool,
    graph_stages: bool,
) -> EngineSpec:
    """The spec of an engine of our own; its config file is written here.

    Args:
        profile: as told to the router. compiles: what it compiles is kept. graph_stages: its graphs
            come later.
    """
    work = s.work_dir
    config = work / "config.json"
    told = {"quantisation": manifest.quantisation, **manifest.config}
    config.write_text(json.dumps(told))
    tokenizers = [e.path for e in manifest.files if e.purpose == "tokenizer"]
    lent = s.convertible_tpot_s > 0
    return EngineSpec(
        engine_id=engine_id,
        role=s.serves,
        model=manifest.model,
        manifest_digest=manifest.digest,
        arena_path=arena.path,
        tensor_table_path=work / "tensors.json",
        ranks=tuple(
            RankSpec(rank, path, work / f"tensors-{rank}.json")
            for rank, path in enumerate(arena.rank_paths)
            if rank
        ),
        config_path=config,
        tokenizer_path=work / "files" / tokenizers[0] if tokenizers else None,
        profile=s.profile or s.worker_class,
        work_dir=work,
        log_path=work / "engine.log",
        host=s.host,
        mode=s.mode,
        compile_cache_dir=work / "compile-cache" if compiles else None,
        kv_tokens=s.kv_tokens,
        # The told profile has the bound of a convertible worker's chunks; others have none.
        max_batch_tokens=profile.max_batch_tokens if lent else 0,
        max_num_seqs=profile.max_num_seqs if lent else 0,
        wait_weights=True,
        graph_stages=graph_stages,
        extra_args=s.engine_args,
    )


def attached_engine(s: AgentSettings, *, engine_id: str) -> EngineSpec:
    """The spec of an engine that was running before: it is only reached."""
    return EngineSpec(
        engine_id=engine_id,
        role=s.role,
        model=s.model,
        manifest_digest=s.manifest,
        arena_path=Path(os.devnull),
        tensor_table_path=Path(os.devnull),
        config_path=Path(os.devnull),
        tokenizer_path=None,
        profile=s.profile or s.worker_class,
        work_dir=s.work_dir,
        log_path=s.work_dir / "engine.log",
    )
