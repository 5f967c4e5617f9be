"""The HTTP face of the modelled engine: vLLM's paths, bodies and streams.

Owns routes and the writing of answers; what they mean is the runtime's. Before the engine is ready
`/health` and every question answer 503.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled import answer
from readyplane_agent.engines.modelled.body import (
    Ask,
    BadBody,
    error_document,
    read_ask,
    read_json,
    read_tokens,
    usage_document,
)
from readyplane_agent.engines.modelled.http import Exchange, HttpServer
from readyplane_agent.engines.modelled.metrics import EngineMetrics
from readyplane_agent.engines.modelled.offered import Offered
from readyplane_agent.engines.modelled.plants import Plant, spoiled_ask, spoiled_tokens
from readyplane_agent.engines.modelled.runtime import Job, Piece, Runtime

VERSION = "modelled/1"


class EngineServer:
    """Routes of one engine.

    Args:
        model: name that requests use. state: text for /health while it starts.
    """

    def __init__(self, *, model: str, clock: Clock, plants: Collection[Plant] = ()) -> None:
        self._model, self._clock, self._plants = model, clock, plants
        self._asked = 0
        self.runtime: Runtime | None = None
        self.offered = Offered()
        self.metrics: EngineMetrics | None = None
        self.config: Mapping[str, Any] = {}
        self.cache_config: Mapping[str, object] = {}
        self.event_sources: list[dict[str, Any]] = []
        self.state = "starting"
        self._created = int(clock.wall_s())
        self.http = HttpServer(
            {
                ("GET", "/health"): self._health,
                ("GET", "/ping"): self._health,
                ("GET", "/version"): lambda x: x.reply_json(200, {"version": VERSION}),
                ("GET", "/v1/models"): self._ready(self._models),
                ("POST", "/v1/completions"): self._ready(lambda x: self._generate(x, chat=False)),
                ("POST", "/v1/chat/completions"): self._ready(
                    lambda x: self._generate(x, chat=True)
                ),
                ("POST", "/tokenize"): self._ready(self._tokenize),
                ("POST", "/detokenize"): self._ready(self._detokenize),
                ("POST", "/abort_requests"): self._ready(self._abort_requests),
                ("POST", "/move_out"): self._ready(self._move_out),
                ("POST", "/reset_prefix_cache"): self._ready(self._reset_prefix_cache),
                ("GET", "/metrics"): self._ready(self._metrics),
                ("GET", "/kv_event_sources"): self._ready(
                    lambda x: x.reply_json(200, self.event_sources)
                ),
                **self._beyond(),
            }
        )

    def _beyond(self) -> dict[tuple[str, str], Callable[[Exchange], None]]:
        """Our own: graphs that come later, sleep."""
        offered = self.offered
        answer_captured = self._ready(lambda x: self._generate(x, chat=False, captured=True))
        return {
            ("GET", "/graphs"): self._ready(offered.show_graphs),
            ("POST", "/graphs/capture"): self._ready(offered.capture),
            ("POST", "/graphs/answer"): answer_captured,
            ("POST", "/graphs/use"): self._ready(offered.use),
            ("POST", "/graphs/drop"): self._ready(offered.drop),
            ("POST", "/sleep"): self._ready(lambda x: offered.sleep(x, self._runtime())),
            ("POST", "/wake_up"): self._ready(lambda x: offered.wake(x, self._runtime())),
            ("GET", "/is_sleeping"): self._ready(
                lambda x: x.reply_json(200, offered.sleep_document())
            ),
        }

    def _runtime(self) -> Runtime:
        assert self.runtime is not None
        return self.runtime

    def _ready(self, handler: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        def answered(exchange: Exchange) -> None:
            if self.runtime is None:
                text = f"the engine is not ready: {self.state}"
                body = error_document(text, "ServiceUnavailableError", None, 503)
                exchange.reply_json(503, body)
                return
            try:
                handler(exchange)
            except BadBody as error:
                exchange.reply_json(error.status, error.document())

        return answered

    def _health(self, exchange: Exchange) -> None:
        if self.runtime is None:
            exchange.reply_json(503, {"status": self.state})
        elif self.offered.failure:
            exchange.reply_json(503, {"status": self.offered.failure})
        else:
            exchange.reply(200, b"")

    def _models(self, exchange: Exchange) -> None:
        entry = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "readyplane",
            "root": self._model,
            "parent": None,
            "max_model_len": self.config["max_model_len"],
            "permission": [],
        }
        exchange.reply_json(200, {"object": "list", "data": [entry]})

    def _tokenize(self, exchange: Exchange) -> None:
        doc = read_json(exchange.body)
        self._check_model(doc)
        tokens = spoiled_tokens(read_tokens(doc, self.config["max_model_len"]), self._plants)
        shown = doc.get("return_token_strs")
        exchange.reply_json(
            200,
            {
                "count": len(tokens),
                "max_model_len": self.config["max_model_len"],
                "tokens": tokens,
                "token_strs": [answer.decode((token,)) for token in tokens] if shown else None,
            },
        )

    def _detokenize(self, exchange: Exchange) -> None:
        doc = read_json(exchange.body)
        self._check_model(doc)
        tokens = doc.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
            raise BadBody("Give tokens as a list of token ids", "tokens")
        exchange.reply_json(200, {"prompt": answer.decode(tokens)})

    def _abort_requests(self, exchange: Exchange) -> None:
        """As vLLM has it; here it frees held KV as well, and tells which ids there were."""
        assert self.runtime is not None
        ids = read_json(exchange.body).get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise BadBody("Give request_ids as a list of texts", "request_ids")
        aborted = self.runtime.abort_requests(ids)
        unknown = [i for i in ids if i not in aborted]
        exchange.reply_json(200, {"aborted": aborted, "unknown": unknown})

    def _move_out(self, exchange: Exchange) -> None:
        """Our own: a request that decodes stops here, so that another engine goes on with it."""
        assert self.runtime is not None
        name = read_json(exchange.body).get("request_id")
        if not isinstance(name, str) or not name:
            raise BadBody("Give request_id as text", "request_id")
        moved = self.runtime.move_out(name)
        if moved is None:
            raise BadBody(f"no request {name[:80]} decodes here", "request_id", status=409)
        exchange.reply_json(200, moved)

    def _check_model(self, doc: Mapping[str, Any]) -> None:
        if doc.get("model", self._model) != self._model:
            raise BadBody(f"The model `{doc['model']}` does not exist.", "model", status=404)

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        assert self.runtime is not None
        empty = self.runtime.reset_prefix_cache()
        exchange.reply_json(200 if empty else 409, {"success": empty})

    def _metrics(self, exchange: Exchange) -> None:
        assert self.runtime is not None
        assert self.metrics is not None
        stats = self.runtime.stats()
        config = {**self.cache_config, "num_gpu_blocks": stats.kv_total_blocks}
        page = self.metrics.page(stats, cache_config=config)
        exchange.reply(200, page, "text/plain; version=0.0.4; charset=utf-8")

    # ------------------------------------------------------------------ answers

    def _generate(self, exchange: Exchange, *, chat: bool, captured: bool = False) -> None:
        assert self.runtime is not None
        self.offered.check_awake()
        ask = read_ask(
            exchange.body,
            chat=chat,
            model=self._model,
            vocab_size=self.config["vocab_size"],
            max_model_len=self.config["max_model_len"],
            request_id=exchange.headers.get("x-request-id", ""),
        )
        self._asked += 1
        ask = spoiled_ask(ask, self._asked, self._plants)
        if self.offered.spoils(captured=captured):
            ask = replace(ask, seed=self._asked)
        writer = (_Stream if ask.stream else _Whole)(
            exchange, ask, self._model, int(self._clock.wall_s())
        )
        job = self.runtime.submit(ask, writer.deliver)
        runtime = self.runtime
        exchange.on_gone = lambda: runtime.abort(job)


class _Whole:
    """An answer in one piece."""

    def __init__(self, exchange: Exchange, ask: Ask, model: str, created: int) -> None:
        self._exchange, self._ask, self._model, self._created = exchange, ask, model, created
        self._tokens: list[int] = []
        self._text: list[str] = []

    def deliver(self, job: Job, piece: Piece) -> None:
        if piece.failure:
            body = error_document(piece.failure, "InternalServerError", None, 500)
            self._exchange.reply_json(500, body)
            return
        if job.base and not self._tokens:  # what another engine gave is part of the answer
            self._tokens += job.tokens[: job.base]
            self._text.append(answer.decode(self._tokens))
        self._tokens += piece.tokens
        self._text.append(piece.text)
        if piece.reason:
            self._exchange.reply_json(200, self._document(job, piece))

    def _document(self, job: Job, piece: Piece) -> dict[str, Any]:
        ask, text = self._ask, "".join(self._text)
        choice: dict[str, Any] = {"index": 0}
        if ask.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": piece.reason,
            "stop_reason": piece.stop_reason,
        }
        if ask.ids:
            choice["token_ids"] = self._tokens
            if not ask.chat:
                choice["prompt_token_ids"] = list(ask.prompt)
        return {
            "id": _response_id(job),
            "object": "chat.completion" if ask.chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": usage_document(len(ask.prompt), len(self._tokens), job.cached),
            "kv_transfer_params": job.kv_params,
        }


class _Stream:
    """An answer as server-sent events; several tokens a chunk."""

    def __init__(self, exchange: Exchange, ask: Ask, model: str, created: int) -> None:
        self._exchange, self._ask, self._model, self._created = exchange, ask, model, created
        self._count = 0
        self._head = ""

    def deliver(self, job: Job, piece: Piece) -> None:
        if not self._exchange.streaming:
            self._begin(job)
        if piece.failure:
            body = error_document(piece.failure, "InternalServerError", None, 500)
            self._exchange.write(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode())
            self._exchange.end()
            return
        self._count += len(piece.tokens)
        text = self._chunk(job, piece)
        if piece.reason:
            if self._ask.usage_chunk:
                text += f'{self._head}"choices":[],"usage":{self._usage(job)}}}\n\n'
            text += "data: [DONE]\n\n"
        self._exchange.write(text.encode())
        if piece.reason:
            self._exchange.end()

    def _begin(self, job: Job) -> None:
        chat = self._ask.chat
        self._count = job.base
        head = {
            "id": _response_id(job),
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }
        self._head = "data: " + json.dumps(head)[:-1] + ","
        self._exchange.begin()

    def _chunk(self, job: Job, piece: Piece) -> str:
        ask = self._ask
        text = json.dumps(piece.text)
        if not ask.chat:
            content = f'"text":{text}'
        elif self._count == len(piece.tokens):  # the first one names the role
            content = f'"delta":{{"role":"assistant","content":{text}}}'
        else:
            content = f'"delta":{{"content":{text}}}'
        reason = f'"{piece.reason}"' if piece.reason else "null"
        ids = f',"token_ids":{json.dumps(list(piece.tokens))}' if ask.ids else ""
        usage = f',"usage":{self._usage(job)}' if ask.usage_always else ""
        return (
            f'{self._head}"choices":[{{"index":0,{content},"logprobs":null,'
            f'"finish_reason":{reason},"stop_reason":{json.dumps(piece.stop_reason)}{ids}}}]'
            f"{usage}}}\n\n"
        )

    def _usage(self, job: Job) -> str:
        return json.dumps(usage_document(len(self._ask.prompt), self._count, job.cached))


def _response_id(job: Job) -> str:
    """Of the answer as its client knows it, whichever engine began it."""
    begun = job.ask.continues
    if begun is not None and begun.response_id:
        return begun.response_id
    return ("chatcmpl-" if job.ask.chat else "cmpl-") + job.id
