"""`make test-gpu`: the host-to-device stage behind the loader's pipeline, where there is a GPU.

Prints `test-gpu: not run: no GPU` and ends well elsewhere. With `--device cpu` it runs anywhere
where PyTorch is.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
import threading
from pathlib import Path

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane_agent.adopt import adopt
from readyplane_agent.arena import Arena
from readyplane_agent.device_arena import DeviceArena
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.files import FileReader
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.rank_plan import SplitRule, plan_rank
from readyplane_agent.source_use import SourceUse
from tests.unit.agent_twins import CHUNK, Artifact, artifact


def has_gpu() -> bool:
    """Whether PyTorch is there and sees one."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


async def load(art: Artifact, folder: Path, device: str, rank: int, tp: int) -> DeviceArena:
    """A rank's part on the device, through the product's pipeline."""
    rules = (SplitRule("*.a", 0),)
    plan = plan_rank(art.manifest, rank=rank, tp=tp, rules=rules)
    arena = DeviceArena(art.manifest, plan, device=device)
    await filled(arena, folder)
    return arena


async def filled(arena: Arena, folder: Path) -> None:
    """All of it, out of a folder."""
    pipeline = Pipeline(arena, clock=SystemClock(), staging_bytes=4 * CHUNK, connections=4)
    use = SourceUse("here", WeightTier.L2_NVME)
    await pipeline.fill(
        lambda: FileReader(lambda entry: folder / entry.path),
        use,
        gone=threading.Event(),
        stop=threading.Event(),
    )
    assert arena.complete, use.fault
    assert pipeline.budget.peak_bytes <= 4 * CHUNK


def check(arena: DeviceArena, art: Artifact) -> int:
    """Compare every byte on the device with the published file; returns how many."""
    found = arena.tensors()
    for placed in arena.plan.placements:
        tensor = placed.tensor
        row = tensor.size_bytes // max(1, tensor.shape[0] if tensor.shape else 1)
        begin = tensor.offset_bytes + placed.start * row
        wanted = art.files[tensor.file][begin : begin + placed.size_bytes]
        got = found[tensor.name].contiguous().cpu().numpy().tobytes()
        assert hashlib.sha256(got).digest() == hashlib.sha256(wanted).digest(), tensor.name
    return arena.device_bytes


async def adopted(art: Artifact, folder: Path, device: str) -> int:
    """An engine's way: the arena's tensors, adopted without a copy, moved to the device."""
    arena = Arena(art.manifest)
    await filled(arena, folder)
    arena.seal()
    table = tensor_table_document(arena_layout(art.manifest), manifest_digest=art.manifest.digest)
    engine = adopt(arena.path, json.dumps(table))
    moved = 0
    for name, tensor in engine.state_dict().items():
        there = tensor.to(device, copy=True)
        assert there.cpu().numpy().tobytes() == engine[name].tobytes(), name
        moved += engine[name].nbytes
    arena.close()
    return moved


def main() -> None:
    """Run it, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device.startswith("cuda") and not has_gpu():
        print("test-gpu: not run: no GPU")
        return
    art = artifact(shards=3, floats=400_000)
    with tempfile.TemporaryDirectory() as name:
        folder = art.write(Path(name))
        moved = asyncio.run(adopted(art, folder, given.device))
        for tp in (1, 2, 4):
            for rank in range(tp):
                arena = asyncio.run(load(art, folder, given.device, rank, tp))
                moved += check(arena, art)
                arena.close()
    print(f"test-gpu: passed on {given.device}, {moved / 1e6:.1f} MB placed and compared")


if __name__ == "__main__":
    main()
