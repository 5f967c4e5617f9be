"""Start one modelled engine: bind, take over the weights, get ready, serve, stop when told.

Owns the order of a start and the wiring of the parts. Exit codes: 0 stopped as told, 1 the start
failed (the reason is the last line of the log and in the start-up file), 2 wrong flags, 4 another
rank of the group is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from itertools import count
from typing import Any

import zmq

from readyplane import profiles
from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import SegmentName, StartMode
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.modelled import rank, settings, standing, startup
from readyplane_agent.engines.modelled.communicator import Communicator, RankLost
from readyplane_agent.engines.modelled.compiled import captured_shapes
from readyplane_agent.engines.modelled.core_stages import StagedEngineModel
from readyplane_agent.engines.modelled.graphs import GraphPlan, GraphStages
from readyplane_agent.engines.modelled.handover import HandoverChannel
from readyplane_agent.engines.modelled.kv_publish import KvPublisher
from readyplane_agent.engines.modelled.memory import GRAPH_BYTES, blocks_of_a_graph, size_pool
from readyplane_agent.engines.modelled.metrics import EngineMetrics
from readyplane_agent.engines.modelled.plants import Plant
from readyplane_agent.engines.modelled.runtime import Runtime
from readyplane_agent.engines.modelled.server import VERSION, EngineServer
from readyplane_agent.engines.modelled.settings import ModelledSettings
from readyplane_agent.engines.modelled.startup import StartupLog, Weights
from readyplane_agent.engines.ranks import LOST_STATUS

LOG = logging.getLogger("engine")
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run until stopped."""
    clock, argv = SystemClock(), sys.argv[1:]
    try:
        if standing.stands_by(argv):
            given = standing.parse(argv)
            if given.parent_pid and not _bound_to_parent(given.parent_pid):
                return 0
            argv = standing.wait_for_orders(given, now_s=clock.monotonic_s())
            os.environ[standing.SPAWNED_AT] = repr(
                startup.there_since_s(given.stand_by, clock=clock)
            )
        s = settings.parse(argv)
    except InvalidField as error:
        print(f"modelled engine: {error}", file=sys.stderr)
        return 2
    if s.parent_pid and not _bound_to_parent(s.parent_pid):
        return 0
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s"
    )
    about = {"engine_id": s.engine_id, "pid": os.getpid(), "state": "starting", "failure": ""}
    log = StartupLog(clock, s.startup_file, about)
    if s.rank:
        return rank.follow(s, clock, log)
    try:
        asyncio.run(_until_signalled(s, clock, log))
    except ReadyplaneError as error:
        what = "has ended" if log.about["state"] == "ready" else "cannot start"
        log.write(state="failed", failure=str(error), lost=getattr(error, "lost", None))
        print(f"modelled engine {what}: {error}", file=sys.stderr, flush=True)
        return LOST_STATUS if isinstance(error, RankLost) else 1
    return 0


def _bound_to_parent(pid: int) -> bool:
    """Have the kernel stop this process when its parent ends; False if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    return os.getppid() == pid


async def _until_signalled(s: ModelledSettings, clock: SystemClock, log: StartupLog) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    await serve(s, clock, log, stopping)


async def serve(
    s: ModelledSettings, clock: SystemClock, log: StartupLog, stopping: asyncio.Event
) -> None:
    """One engine life in this loop, until `stopping` is set.

    Raises:
        ReadyplaneError: why the start failed.
    """
    loop = asyncio.get_running_loop()
    now_s = clock.monotonic_s()
    since_s = float(os.environ.get(standing.SPAWNED_AT) or now_s)
    saved_s = float(os.environ.get(standing.IMPORT_SAVED) or 0.0)
    detail = "imported while it stood by" if saved_s else ""
    log.add(SegmentName.RUNTIME_IMPORT, since_s, now_s, detail, saved_s=saved_s)
    server = EngineServer(model=s.model, clock=clock, plants=s.plants)
    try:
        port = await server.http.start(s.host, s.port)
    except OSError as error:
        raise Unavailable(
            f"cannot bind {s.host}:{s.port} ({error.strerror})", "choose another --port or 0"
        ) from error
    log.write(port=port)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    group: asyncio.Future[Communicator] = loop.create_future()
    starting = loop.create_task(_start(s, clock, log, server, context, group))
    stopped = loop.create_task(stopping.wait())
    lost = loop.create_task(rank.lost(group))
    beats: asyncio.Task[None] | None = None
    try:
        await asyncio.wait({starting, stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            lost.result()
        if starting.done():
            runtime = starting.result()
            beats = loop.create_task(runtime.keep_remote_alive(max(1.0, s.kv_hold_s / 3)))
            await asyncio.wait({stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
            server.offered.stop()
            runtime.stop()
            if lost.done():
                lost.result()
    finally:
        if group.done():
            group.result().close()
        for task in (starting, stopped, lost, beats):
            if task is not None:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ReadyplaneError):
            await starting
        if server.runtime is not None:
            for part in (server.runtime.channel, server.runtime.publisher):
                if part is not None:
                    part.close()
        await server.http.stop()
        context.destroy(linger=0)


async def _start(
    s: ModelledSettings,
    clock: SystemClock,
    log: StartupLog,
    server: EngineServer,
    context: zmq.Context[zmq.Socket[bytes]],
    group: asyncio.Future[Communicator],
) -> Runtime:
    profile = profiles.load(s.profile)
    config = startup.read_config(s.config)
    startup.read_tokenizer(s.tokenizer)
    now_s = clock.monotonic_s()
    log.add(SegmentName.RUNTIME_IMPORT, log.done_s or now_s, now_s, "HTTP and configuration")
    await startup.modelled(log, clock, s, SegmentName.PARALLEL_INIT)
    since_s = log.done_s
    if s.wait_weights_s:
        await startup.wait_for(s.tensor_table, limit_s=s.wait_weights_s, clock=clock)
        there_s = startup.there_since_s(s.tensor_table, clock=clock)
        since_s = there_s if since_s is None else max(since_s, there_s)
    with log.segment(SegmentName.HOST_TO_DEVICE, since_s=since_s):
        weights = (
            await rank.lead(s, clock, log, group)
            if s.world > 1
            else Weights(s.arena, s.tensor_table, s.plants)
        )
    LOG.info("%d tensors, %d bytes mapped", weights.tensor_count, weights.size_bytes)
    block_size = s.block_size or config["block_size"]
    if not s.graph_stages:  # else both come while it serves
        await startup.modelled(log, clock, s, SegmentName.COMPILE)
    kv_blocks = await size_pool(
        log, clock, s, profile, weights_bytes=weights.size_bytes, block_size=block_size
    )
    if Plant.HALF_KV in s.plants:
        kv_blocks //= 2
    if not s.graph_stages:
        await startup.modelled(log, clock, s, SegmentName.CUDA_GRAPH)
    eager = s.mode is StartMode.EAGER or s.graph_stages
    model = StagedEngineModel(
        profile,
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_batch_tokens=s.max_batch_tokens or None,
        max_num_seqs=s.max_num_seqs or None,
        prefix_caching=s.prefix_caching,
        iteration_factor=s.eager_factor if eager else 1.0,
        hold_s=s.kv_hold_s,
        coalesce_s=s.coalesce_s,
    )
    longest = (
        kv_blocks * block_size if s.device_bytes else s.kv_tokens or profile.kv_capacity_tokens
    )
    plan = _graph_plan(s, profile, block_size)
    if plan is not None:  # what is promised for one request holds at every stage
        longest -= len(plan.shapes) * plan.shape_blocks * block_size
    server.config = {**config, "max_model_len": max(1, min(config["max_model_len"], longest))}
    numbers = count()
    runtime = Runtime(
        model,
        clock,
        metrics=EngineMetrics(s.model),
        weights=weights.fingerprint,
        max_model_len=server.config["max_model_len"],
        max_waiting=s.max_waiting,
        link=s.link,
        engine_id=s.engine_id,
        host=s.host,
        make_id=lambda: f"{s.engine_id[-12:]}-{next(numbers)}",
    )
    if plan is not None:
        server.offered.graphs = GraphStages(
            model, plan, settings=s, clock=clock, pump=runtime.stats, plants=s.plants
        )
    alone = s.world == 1
    server.offered.reread = (
        (lambda: Weights(s.arena, s.tensor_table, s.plants)) if alone else rank.never_again
    )
    await startup.modelled(log, clock, s, SegmentName.WARMUP)
    _open_channels(s, runtime, context, config, block_size)
    _publish_facts(s, server, runtime, log, config, block_size)
    server.metrics, server.state, server.runtime = runtime.metrics, "ready", runtime
    log.write(state="ready", fingerprint=f"{weights.fingerprint:016x}")
    LOG.info("ready: %s on %s:%s", s.model, s.host, log.about["port"])
    return runtime


def _graph_plan(s: ModelledSettings, profile: ClassProfile, block_size: int) -> GraphPlan | None:
    """What is captured later; None where the start has it all."""
    if not s.graph_stages:
        return None
    blocks = blocks_of_a_graph(s, profile, block_size=block_size)
    return GraphPlan(captured_shapes(s), blocks, GRAPH_BYTES if s.device_bytes else 0)


def _open_channels(
    s: ModelledSettings,
    runtime: Runtime,
    context: zmq.Context[zmq.Socket[bytes]],
    config: dict[str, Any],
    block_size: int,
) -> None:
    kv_format = {
        "model_digest": s.manifest_digest,
        "kv_dtype": str(config.get("kv_dtype", "fp8_e4m3")),
        "block_size": str(block_size),
        "engine": VERSION,
    }
    try:
        runtime.channel = HandoverChannel(
            context,
            host=s.host,
            port=s.side_channel_port,
            engine_id=s.engine_id,
            kv_format=kv_format,
            on_pulled=runtime.on_pulled,
            on_extend=runtime.on_extend,
            answer_limit_s=s.kv_answer_limit_s,
            reads_others=Plant.ONE_WAY_KV not in s.plants,
        )
        runtime.publisher = KvPublisher(
            context,
            host=s.host,
            port=s.kv_events_port,
            replay_port=s.kv_replay_port,
            topic=f"kv@{s.engine_id}@{s.model}",
            block_size=block_size,
            buffer_steps=s.kv_buffer_steps,
            tokens_reversed=Plant.KV_HASHES in s.plants,
        )
    except OSError as error:
        raise Unavailable(str(error), "choose other ports, or 0 for free ones") from error


def _publish_facts(
    s: ModelledSettings,
    server: EngineServer,
    runtime: Runtime,
    log: StartupLog,
    config: dict[str, Any],
    block_size: int,
) -> None:
    """What others may ask about this engine: at /metrics, /kv_event_sources and in the file."""
    assert runtime.channel is not None
    assert runtime.publisher is not None
    live, replay = runtime.publisher.ports
    blocks = runtime.model.pool.total
    server.cache_config = {
        "block_size": block_size,
        "num_gpu_blocks": blocks,
        "cache_dtype": config.get("kv_dtype", "fp8_e4m3"),
        "enable_prefix_caching": s.prefix_caching,
        "quantisation": _quantisation(s, config),
    }
    server.event_sources = [
        {
            "data_parallel_rank": 0,
            "endpoint": f"tcp://{s.host}:{live}",
            "replay_endpoint": f"tcp://{s.host}:{replay}",
            "topic": f"kv@{s.engine_id}@{s.model}",
        }
    ]
    log.write(
        side_channel_port=runtime.channel.port,
        kv_events_port=live,
        kv_replay_port=replay,
        block_size=block_size,
        kv_blocks=blocks,
        max_num_seqs=runtime.model.max_num_seqs,
        max_model_len=server.config["max_model_len"],
        kv_dtype=str(config.get("kv_dtype", "fp8_e4m3")),
    )


def _quantisation(s: ModelledSettings, config: dict[str, Any]) -> str:
    """As the engine has the weights: what the agent told, unless it casts them."""
    told = str(config.get("quantisation", ""))
    return f"{told or 'none'}-cast" if Plant.WRONG_QUANTISATION in s.plants else told


if __name__ == "__main__":
    sys.exit(main())
