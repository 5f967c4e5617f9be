"""A small server that speaks SGLang's protocol: what a test of the adapter starts in its place.

It has no model. A token follows from all tokens before it and from the bytes of the weights, through
one running state; that state is what a prefill server hands over, so a wrong or missing hand-over
shows in the answer. Paths, bodies, metrics, KV events and the meeting under a bootstrap room are as
SGLang documents them; how two servers meet on the wire is its own affair, here one HTTP request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import xxhash
import zmq
import zmq.asyncio
from aiohttp import web

NOBODY = "2.2.2.2"
EOS = 2
OFFSET = 3
TOKEN_S = 0.001
REPLAY_BATCHES = 1000
pack = msgspec.msgpack.encode


def seed_of(folder: Path) -> int:
    """The weights as one number: every byte of every file of theirs counts."""
    found = xxhash.xxh3_64()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return int(found.intdigest())


def after(state: int, tokens: Sequence[int]) -> int:
    """The state behind more tokens."""
    for token in tokens:
        state = xxhash.xxh3_64_intdigest(token.to_bytes(4, "little"), seed=state)
    return state


def token_of(state: int) -> int:
    """The token that follows: a printable byte, now and then the end."""
    return EOS if state % 97 == 0 else OFFSET + 32 + state % 95


def answer_of(folder: Path, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The first tokens that a server over these weights answers, none of them the end."""
    state, found = after(seed_of(folder), prompt), []
    for _ in range(count):
        token = token_of(state)
        found.append(token if token != EOS else OFFSET + 32)
        state = after(state, found[-1:])
    return tuple(found)


def question_for(folder: Path, count: int) -> tuple[int, ...]:
    """A prompt whose answer does not end within so many tokens."""
    for begin in range(40, 90):
        prompt = (begin, 41, 42, 43)
        state = after(seed_of(folder), prompt)
        for _ in range(count):
            if token_of(state) == EOS:
                break
            state = after(state, [token_of(state)])
        else:
            return prompt
    raise ValueError(count)


def text_of(tokens: Sequence[int]) -> str:
    """What byte tokens say."""
    return bytes(t - OFFSET for t in tokens if t >= OFFSET).decode("latin-1")


@dataclass
class Request:
    """One request under way."""

    rid: str
    tokens: list[int]
    wanted: int
    ignore_eos: bool
    stop: list[str]
    room: int | None = None
    host: str = ""
    port: int = 0
    cached: int = 0
    output: list[int] = field(default_factory=list)
    ended: str = ""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """The answer so far; nothing of a stop text or behind it."""
        text = text_of(self.output)
        cuts = [text.index(s) for s in self.stop if s in text]
        return text[: min(cuts)] if cuts else text


class Refused(Exception):
    """The client's fault."""


class Events:
    """KV events in SGLang's form, with a replay in the older form of three frames."""

    def __init__(self, config: dict[str, str]) -> None:
        context = zmq.asyncio.Context.instance()
        self._live, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._live.bind(config["endpoint"])
        self._replay.bind(config["replay_endpoint"])
        self._kept: list[bytes] = []

    async def stored(
        self, hashes: list[int], parent: int | None, tokens: list[int], page: int
    ) -> None:
        event = ["BlockStored", hashes, parent, tokens, page, None, "GPU"]
        payload = pack([time.time(), [event], 0])
        number = len(self._kept).to_bytes(8, "big")
        self._kept.append(payload)
        await self._live.send_multipart([b"", number, payload])

    async def serve(self) -> None:
        while True:
            who, empty, start = await self._replay.recv_multipart()
            for at in range(int.from_bytes(start, "big"), len(self._kept)):
                frames = [who, empty, at.to_bytes(8, "big"), self._kept[at]]
                await self._replay.send_multipart(frames)
            await self._replay.send_multipart(
                [who, empty, (-1).to_bytes(8, "big", signed=True), b""]
            )


class Server:
    """One server of one stage, or of both (`null`)."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = json.loads((Path(args.model_path) / "config.json").read_text())
        self.length = int(config["max_model_len"])
        self.seed = seed_of(Path(args.model_path))
        self.events = Events(json.loads(args.kv_events_config))
        self.pages: OrderedDict[int, None] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.meeting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.waiting = 0
        self.counts = dict.fromkeys(("prefill_compute", "prefill_cache", "decode"), 0)
        self.ttft: list[float] = []
        self.numbers = 0

    # ------------------------------------------------------------------ what a model does

    async def prefill(self, request: Request) -> int:
        """Compute the prompt, page by page, and tell of the pages that are new."""
        page, tokens = self.args.page_size, request.tokens
        hits, parent, state = 0, None, self.seed
        new: list[int] = []
        for at in range(0, len(tokens) // page * page, page):
            state = after(state, tokens[at : at + page])
            key = state & 0x7FFFFFFFFFFFFFFF
            if key in self.pages and not new:
                hits, parent = hits + 1, key
                self.pages.move_to_end(key)
            else:
                new.append(key)
        request.cached = min(hits, (len(tokens) - 1) // page) * page
        if new:
            begin = hits * page
            await self.events.stored(new, parent, tokens[begin : begin + len(new) * page], page)
        self.pages.update(dict.fromkeys(new))
        self.counts["prefill_cache"] += request.cached
        self.counts["prefill_compute"] += len(tokens) - request.cached
        return after(self.seed, tokens)

    async def met(self, request: Request) -> int:
        """The state of a prompt: computed here, or handed over by a prefill server."""
        mode = self.args.disaggregation_mode
        if mode == "null":
            return await self.prefill(request)
        if request.room is None:
            raise Refused("a disaggregated server needs bootstrap_host and bootstrap_room")
        if mode == "decode":
            return await self._take(request)
        state = await self.prefill(request)
        if request.host != NOBODY:
            await self._hand_over(request, state)
        return state

    async def _hand_over(self, request: Request, state: int) -> None:
        room = self.meeting.setdefault(
            request.room or 0, asyncio.get_running_loop().create_future()
        )
        taken = asyncio.Event()
        room.set_result({"state": state, "tokens": len(request.tokens), "taken": taken})
        try:
            await self._or_aborted(request, taken.wait())
        finally:
            self.meeting.pop(request.room or 0, None)

    async def _take(self, request: Request) -> int:
        url = f"http://{request.host}:{request.port}/meet/{request.room}"

        async def ask() -> dict[str, Any]:
            async with aiohttp.ClientSession() as http, http.post(url) as answer:
                return dict(await answer.json())

        try:
            found = await self._or_aborted(request, ask())
        except aiohttp.ClientError as error:
            raise RuntimeError(f"Decode bootstrap failed: KVTransferError({error})") from error
        if found["tokens"] != len(request.tokens):
            raise RuntimeError("Decode transfer failed: KVTransferError(another length)")
        return int(found["state"])

    async def meet(self, asked: web.Request) -> web.Response:
        """A decode server comes for what was computed; it waits as long as that takes."""
        loop = asyncio.get_running_loop()
        room = self.meeting.setdefault(int(asked.match_info["room"]), loop.create_future())
        found = await asyncio.shield(room)
        found["taken"].set()
        return web.json_response({"state": found["state"], "tokens": found["tokens"]})

    async def _or_aborted(self, request: Request, work: Any) -> Any:
        doing = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.aborted.wait())
        try:
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise RuntimeError("aborted while it waited for the other server")
            return doing.result()
        finally:
            doing.cancel()
            gone.cancel()

    async def answer(self, request: Request) -> AsyncIterator[int]:
        """Token after token; `request.ended` says why there are no more."""
        begun_s = time.monotonic()
        self.running[request.rid] = request
        wanted = 1 if self.args.disaggregation_mode == "prefill" else request.wanted
        try:
            state = await self.met(request)
            for n in range(wanted):
                await asyncio.sleep(TOKEN_S)
                if request.aborted.is_set():
                    request.ended = "abort"
                    return
                token = token_of(state)
                if request.ignore_eos and token == EOS:
                    token = OFFSET + 32
                state = after(state, [token])
                request.output.append(token)
                self.counts["decode"] += 1
                if n == 0:
                    self.ttft.append(time.monotonic() - begun_s)
                stopped = any(s in text_of(request.output) for s in request.stop)
                if stopped or token == EOS:
                    request.ended = "stop"
                yield token
                if request.ended:
                    break
            request.ended = request.ended or "length"
            await self._keep(request)
        finally:
            del self.running[request.rid]

    async def _keep(self, request: Request) -> None:
        """What was generated joins the cache, but the last token, which has no KV yet."""
        if self.args.disaggregation_mode == "null":
            before = dict(self.counts)
            whole = [*request.tokens, *request.output][:-1]
            await self.prefill(Request("", whole, 0, False, []))
            self.counts = before

    # ------------------------------------------------------------------ requests

    def request_of(
        self, body: dict[str, Any], tokens: list[int], params: dict[str, Any]
    ) -> Request:
        wanted = params.get("max_new_tokens", params.get("max_tokens"))
        wanted = 128 if wanted is None else wanted
        if wanted < 0 or params.get("temperature", 1) < 0:
            raise Refused("max_new_tokens and temperature must be at least 0")
        if len(tokens) >= self.length:
            raise Refused(
                f"The input ({len(tokens)} tokens) is longer than the model's context length "
                f"({self.length} tokens)."
            )
        stop = params.get("stop") or []
        self.numbers += 1
        return Request(
            rid=body.get("rid") or f"r{self.numbers}",
            tokens=tokens,
            wanted=min(wanted, self.length - len(tokens)),
            ignore_eos=bool(params.get("ignore_eos")),
            stop=[stop] if isinstance(stop, str) else list(stop),
            room=body.get("bootstrap_room"),
            host=str(body.get("bootstrap_host") or ""),
            port=int(body.get("bootstrap_port") or 0),
        )

    async def generate(self, asked: web.Request) -> web.StreamResponse:
        """SGLang's own path."""
        body = await _json(asked)
        params = body.get("sampling_params") or {}
        tokens = body.get("input_ids") or [b + OFFSET for b in str(body.get("text", "")).encode()]
        request = self.request_of(body, tokens, params)
        if (choices := params.get("regex")) is not None:  # a choice of texts, as the probes ask for
            text = choices.strip("()").split("|")[0]
            request.stop, request.ignore_eos = [], True
            return web.json_response(self._told(request, [b + OFFSET for b in text.encode()], text))
        async for _ in self.answer(request):
            pass
        return web.json_response(self._told(request, request.output, request.text))

    def _told(self, request: Request, output: list[int], text: str) -> dict[str, Any]:
        meta = {
            "id": request.rid,
            "finish_reason": {"type": request.ended or "stop"},
            "prompt_tokens": len(request.tokens),
            "completion_tokens": len(output),
            "cached_tokens": request.cached,
        }
        return {"text": text, "output_ids": output, "meta_info": meta}

    async def openai(self, asked: web.Request) -> web.StreamResponse:
        """Completions and chats."""
        body = await _json(asked)
        chat = asked.path.endswith("chat/completions")
        request = self.request_of(body, _prompt(body, chat=chat), body)
        kind = "chat.completion" if chat else "text_completion"
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + request.rid,
            "created": int(time.time()),
            "model": body.get("model"),
        }
        if body.get("stream"):
            return await self._stream(asked, body, request, {**head, "chat": chat})
        async for _ in self.answer(request):
            pass
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": request.ended}
        if chat:
            choice["message"] = {"role": "assistant", "content": request.text}
        else:
            choice["text"] = request.text
        if request.ended == "stop" and request.stop:
            choice["matched_stop"] = next(s for s in request.stop if s in text_of(request.output))
        return web.json_response(
            {**head, "object": kind, "choices": [choice], "usage": _usage(request)}
        )

    async def _stream(
        self, asked: web.Request, body: dict[str, Any], request: Request, head: dict[str, Any]
    ) -> web.StreamResponse:
        chat = head.pop("chat")
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        options = body.get("stream_options") or {}
        each = options.get("continuous_usage_stats")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        said = 0

        async def send(choices: list[dict[str, Any]], *, usage: bool) -> None:
            document = {**head, "choices": choices, "usage": _usage(request) if usage else None}
            if not response.prepared:
                await response.prepare(asked)
            await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")

        async for token in self.answer(request):
            text = request.text
            piece, said = text[said:], max(said, len(text))
            delta = {"role": "assistant", "content": piece} if chat else None
            choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": None}
            if chat:
                choice["delta"] = delta
            else:
                choice["text"] = piece
            if token != EOS:
                await send([choice], usage=bool(each))
        last: dict[str, Any] = {"index": 0, "finish_reason": request.ended}
        last["delta" if chat else "text"] = {} if chat else ""
        await send([last], usage=bool(each))
        if options.get("include_usage"):
            await send([], usage=True)
        await response.write(b"data: [DONE]\n\n")
        return response

    # ------------------------------------------------------------------ the rest

    async def abort(self, asked: web.Request) -> web.Response:
        """`/abort_request`: nothing is said of whether it was known."""
        body = await _json(asked)
        for rid, request in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                request.aborted.set()
        return web.Response()

    async def info(self, _: web.Request) -> web.Response:
        """`/get_server_info`: what it was started with, and what it found it can hold."""
        told = {
            "version": "double",
            "model_path": self.args.model_path,
            "page_size": self.args.page_size,
            "tp_size": 1,
            "dp_size": 1,
            "kv_cache_dtype": "auto",
            "context_length": self.length,
            "max_total_num_tokens": self.args.max_total_tokens,
            "max_running_requests": self.args.max_running_requests,
            "disaggregation_mode": self.args.disaggregation_mode,
            "disaggregation_transfer_backend": self.args.disaggregation_transfer_backend,
            "internal_states": [{}],
        }
        return web.json_response(told)

    async def models(self, _: web.Request) -> web.Response:
        """`/v1/models`."""
        card = {"id": self.args.served_model_name, "object": "model", "max_model_len": self.length}
        return web.json_response({"object": "list", "data": [card]})

    async def tokenize(self, asked: web.Request) -> web.Response:
        """`/tokenize` of a text."""
        tokens = [b + OFFSET for b in str((await _json(asked))["prompt"]).encode()]
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.length}
        )

    async def detokenize(self, asked: web.Request) -> web.Response:
        """`/detokenize`, which says `text`."""
        tokens = (await _json(asked))["tokens"]
        return web.json_response({"text": bytes(t - OFFSET for t in tokens).decode()})

    async def metrics(self, _: web.Request) -> web.Response:
        """The page of `--enable-metrics`, once a rank."""
        total = self.args.max_total_tokens
        used = sum(len(r.tokens) + len(r.output) for r in self.running.values())
        gauges: dict[str, float] = {
            "num_running_reqs": len(self.running),
            "num_queue_reqs": self.waiting,
            "num_prefill_inflight_queue_reqs": 0,
            "num_decode_transfer_queue_reqs": 0,
            "token_usage": min(1.0, used / total),
            "num_retracted_reqs": 0,
        }
        lines = []
        for rank in (0, 1):
            own = f'model_name="{self.args.served_model_name}",tp_rank="{rank}"'
            lines += [f"sglang:{name}{{{own}}} {value}" for name, value in gauges.items()]
            lines += [
                f'sglang:realtime_tokens_total{{{own},mode="{m}"}} {n}'
                for m, n in self.counts.items()
            ]
            pages = f'page_size="{self.args.page_size}",num_pages="{total // self.args.page_size}"'
            lines.append(f"sglang:cache_config_info{{{own},{pages}}} 1.0")
        name = "sglang:time_to_first_token_seconds"
        lines += [
            f'{name}_bucket{{model_name="x",le="+Inf"}} {len(self.ttft)}',
            f'{name}_sum{{model_name="x"}} {sum(self.ttft)}',
            f'{name}_count{{model_name="x"}} {len(self.ttft)}',
        ]
        return web.Response(text="\n".join(lines) + "\n")


async def _json(asked: web.Request) -> dict[str, Any]:
    try:
        body = await asked.json()
    except ValueError:
        raise Refused("the body is no JSON") from None
    if not isinstance(body, dict):
        raise Refused("the body is no object")
    return body


def _prompt(body: dict[str, Any], *, chat: bool) -> list[int]:
    if chat:
        text = "".join(
            f"<{m['role']}>"
            + (
                m["content"]
                if isinstance(m["content"], str)
                else "".join(part["text"] for part in m["content"])
            )
            for m in body["messages"]
        )
        return [b + OFFSET for b in text.encode()] + [b + OFFSET for b in b"<assistant>"]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return list(prompt)
    if not prompt:
        raise Refused("no prompt")
    return [b + OFFSET for b in str(prompt).encode()]


def _usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": len(request.tokens),
        "completion_tokens": len(request.output),
        "total_tokens": len(request.tokens) + len(request.output),
        "prompt_tokens_details": {"cached_tokens": request.cached},
    }


@web.middleware
async def errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """SGLang's errors are flat documents."""
    status, kind = 500, "InternalServerError"
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except (Refused, KeyError, TypeError) as error:
        status, kind, why = 400, "BadRequestError", str(error)
    except RuntimeError as error:
        why = str(error)
    document = {"object": "error", "message": why, "type": kind, "param": None, "code": status}
    return web.json_response(document, status=status)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """SGLang's own flags, as far as they say something here; an unknown one ends the start."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    for name in ("model-path", "served-model-name", "host", "kv-events-config"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (
        ("port", 30000),
        ("page-size", 1),
        ("max-total-tokens", 65536),
        ("max-running-requests", 64),
        ("disaggregation-bootstrap-port", 8998),
        ("chunked-prefill-size", 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in (
        "enable-metrics",
        "enable-cache-report",
        "disable-cuda-graph",
        "enable-mixed-chunk",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"])
    parser.add_argument("--disaggregation-transfer-backend", default="mooncake")
    return parser.parse_args(list(argv))


async def main(args: argparse.Namespace) -> None:
    """Start as SGLang does: the port opens when everything is there."""
    part_s = float(os.environ.get("SGLANG_DOUBLE_PART_S", "0"))
    for said in ("Load weight begin. avail mem=1 GB", "Load weight end. type=Double"):
        print(f"[2026-01-01 00:00:00 TP0] {said}", flush=True)
        await asyncio.sleep(part_s)
    server = Server(args)
    if not args.disable_cuda_graph:
        print("[2026-01-01 00:00:00 TP0] Capture cuda graph begin.", flush=True)
        await asyncio.sleep(part_s)
        print("[2026-01-01 00:00:00 TP0] Capture cuda graph end.", flush=True)
    app = web.Application(middlewares=[errors], client_max_size=2**26)
    app.add_routes(
        [
            web.get("/health", lambda _: _ok()),
            web.get("/get_server_info", server.info),
            web.get("/v1/models", server.models),
            web.get("/metrics", server.metrics),
            web.post("/generate", server.generate),
            web.post("/v1/completions", server.openai),
            web.post("/v1/chat/completions", server.openai),
            web.post("/tokenize", server.tokenize),
            web.post("/detokenize", server.detokenize),
            web.post("/abort_request", server.abort),
        ]
    )
    meet = web.Application()
    meet.add_routes([web.post("/meet/{room}", server.meet)])
    places = [(app, args.port)]
    if args.disaggregation_mode == "prefill":
        places.append((meet, args.disaggregation_bootstrap_port))
    for one, port in places:
        runner = web.AppRunner(one, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, args.host, port).start()
    await server.events.serve()


async def _ok() -> web.Response:
    return web.Response()


if __name__ == "__main__":
    asyncio.run(main(parse(sys.argv[1:])))
