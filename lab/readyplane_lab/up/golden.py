"""The known answer of a model, asked of a running engine when the model is published.

Owns the choice of the question. Greedy answers of one model may differ between two kernels where two
tokens are nearly as likely, so several questions are asked and the one is kept whose every token was
the clearest choice: another engine over the same weights gives it, and one over others does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from readyplane.core.errors import Refused
from readyplane.core.identity import Canary
from readyplane_agent.engines.openai import OpenAiEngine

ANSWER_TOKENS = 12
LIMIT_S = 120.0
QUESTIONS = (
    "What makes worker 3625 ready?",
    "Which prefill worker gives its blocks to which decode worker?",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "0 1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987",
    "The lease was granted, the weights were verified, the group was formed.",
    "Name the first five chunks of the artifact in the order of their digests.",
    "Once upon a time there was a token that nobody had ever decoded before.",
    "def ready(worker): return all(check.passed for check in worker.checks)",
)


@dataclass(frozen=True, slots=True)
class Golden:
    """A question with its answer.

    Attributes:
        canary: for `manifest.canary`. ends: the answer ends by itself, for `canary_ends`.
        margin: least difference of log-probability between the chosen token and the next likely.
    """

    canary: Canary
    ends: bool
    margin: float


async def ask_golden(client: OpenAiEngine, questions: Sequence[str] = QUESTIONS) -> Golden:
    """The clearest answer to one of these questions.

    Raises:
        Refused: no answer repeats itself. Unavailable: the engine does not answer.
        InvalidField, Unsupported: it refuses token ids or log-probabilities.
    """
    found = [g for text in questions if (g := await _asked(client, text)) is not None]
    if not found:
        raise Refused(
            "known answer",
            ["the engine gives no question the same greedy answer twice"],
            "publish from an engine whose greedy sampling repeats itself",
        )
    return max(found, key=lambda golden: golden.margin)


async def _asked(client: OpenAiEngine, text: str) -> Golden | None:
    prompt = await client.tokenize(text)
    body = {
        "model": client.model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # two tokens may read the same
    }
    (choice,) = (await client.post("/v1/completions", body, timeout_s=LIMIT_S))["choices"]
    answer = tuple(int(t) for t in choice["token_ids"])
    # The second time the prefix cache has the prompt.
    again = await client.generate(prompt, max_tokens=ANSWER_TOKENS, timeout_s=LIMIT_S)
    if not answer or again.token_ids != answer:
        return None
    ends = choice["finish_reason"] == "stop"
    return Golden(Canary(prompt, answer), ends, _margin(choice["logprobs"]["top_logprobs"]))


def _margin(positions: Sequence[dict[str, float] | None]) -> float:
    """Least lead of the first of two candidates; 0 where there is no second to compare with."""
    leads = []
    for candidates in positions:
        best = sorted((candidates or {}).values(), reverse=True)[:2]
        leads.append(best[0] - best[1] if len(best) == 2 else 0.0)
    return min(leads, default=0.0)
