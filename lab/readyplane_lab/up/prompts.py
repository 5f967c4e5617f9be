"""How a workload's requests are put to an engine: as tokens, or as text that a person can read.

Owns the body of each request. Requests that share their first parts share the beginning of their
prompt either way, which is what prefix caches live on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from readyplane_lab.workload.request import WorkloadRequest, prompt_tokens, stream

MAX_TOKENS_BOUND = 2048
TEXT_SHARE = 0.8
"""Of what the context leaves beside the answer, what a text may fill: tokens are only estimated."""
_TEXT = (
    "worker prefill decode token block prefix lease epoch gate group rank chunk weight digest the a "
    "of in from to before after while until and or not ready slow warm cold whole one two each every "
    "asks gives holds reads writes waits begins ends grows drains serves answers knows finds keeps"
)
WORDS = tuple(_TEXT.split())

Body = Callable[[WorkloadRequest], dict[str, Any]]


def as_tokens(model: str) -> Body:
    """For the modelled engine, which is told the true length of the answer."""

    def body(request: WorkloadRequest) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": prompt_tokens(request).tolist(),
            "max_tokens": max(MAX_TOKENS_BOUND, request.osl),
            "vllm_xargs": {"modelled_output_tokens": request.osl},
        }

    return body


def as_text(model: str, *, context: int, characters_per_token: float) -> Body:
    """For a real engine: English words, cut to what fits, and an answer of exactly that length.

    Args:
        context: longest prompt with its answer, tokens. characters_per_token: of such words.
    """

    def body(request: WorkloadRequest) -> dict[str, Any]:
        room = int(TEXT_SHARE * max(0, context - request.osl))
        text = "".join(
            words_of(seed, round(length * characters_per_token)) for seed, length in request.parts
        )
        return {
            "model": model,
            "prompt": text[: max(1, int(min(request.isl, room) * characters_per_token))],
            "max_tokens": request.osl,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }

    return body


@lru_cache(maxsize=1024)
def words_of(seed: int, characters: int) -> str:
    """The first `characters` of the endless text `seed`; longer asks extend shorter ones."""
    shortest = min(len(word) for word in WORDS) + 1
    numbers = stream(seed, -(-characters // shortest))
    return " ".join(WORDS[int(n) % len(WORDS)] for n in numbers)[:characters]
