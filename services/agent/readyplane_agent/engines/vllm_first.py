"""Requests whose first one makes a vLLM compile something, asked before anybody else can ask.

Owns which these are. vLLM compiles some of its sampling when it is first wanted, whatever its start
mode, and computes nothing else meanwhile: for seconds, in which hand-overs beside it run out of
time. `vllm` asks them as a part of the start, so that ready means ready; what they compiled lies in
the compile cache and is taken over by the next start like everything else there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from readyplane.core.errors import ReadyplaneError
from readyplane_agent.engines.openai import OpenAiEngine

log = logging.getLogger("agent.vllm")

PROMPT = (1, 2, 3)  # shorter than a KV block: it leaves nothing in the prefix cache
FIRST: Mapping[str, Mapping[str, Any]] = {"first_logprobs": {"logprobs": 1}}
"""What is asked after which mark (`vllm_marks.STEPS`): fields of a completion of one token."""


async def ask_first(
    client: OpenAiEngine, tell: Callable[[str], None], *, timeout_s: float
) -> tuple[str, ...]:
    """Ask each of them once, and give back the marks of those that were answered.

    One that the engine refuses (`--max-logprobs 0`) nobody else gets answered either: it is said in
    the log, and the start goes on.

    Args:
        tell: sets a mark. timeout_s: for each; whoever calls watches the engine meanwhile.
    """
    answered = []
    for mark, fields in FIRST.items():
        tell(mark)
        try:
            await client.complete(PROMPT, max_tokens=1, timeout_s=timeout_s, **fields)
        except ReadyplaneError as error:
            log.warning("a request with %s was not answered: %s", ", ".join(fields), error)
            continue
        answered.append(mark)
    return tuple(answered)
