"""What an engine can be asked beside its canary: sampling, structured output, tokenizer, formats.

Owns the questions over the OpenAI-style API and the evidence they add to the checks `basics`,
`tokenizer_revision` and `kv_pool` (R18.1). An engine that does not offer one of them says so by
refusing the request; that is noted as not offered and never taken for a good answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable, Unsupported
from readyplane.core.identity import Manifest
from readyplane.core.worker import CheckResult, Serving
from readyplane_agent.arena import Arena
from readyplane_agent.engines.openai import OpenAiEngine, labels_of

LIMIT_S = 30.0
SEED = 20_011
SAMPLED_TOKENS = 12
CHOICES = ("ready", "not yet")
# Older and newer names for an answer that is one of some texts (vLLM).
CHOICE_FIELDS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"choice": list(CHOICES)}},
    {"guided_choice": list(CHOICES)},
)
TEXT = "Which P and D make a pair? 0123456789 Grüße"
CACHE_INFO = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine was found to do; `detail` in words."""

    sampling: bool | str
    structured: bool | str
    quantisation: str
    kv_dtype: str
    detail: str = ""


async def ask_basics(client: OpenAiEngine, prompt: Sequence[int]) -> Asked:
    """Ask for sampled and constrained answers, and what formats it has.

    Raises:
        Unavailable: it does not answer.
    """
    sampling, one = await _sampling(client, prompt)
    structured, two = await _structured(client, prompt)
    info = labels_of(await client.get("/metrics", timeout_s=LIMIT_S), CACHE_INFO)
    return Asked(
        sampling,
        structured,
        info.get("quantisation", "") or gc.NOT_TOLD,
        info.get("cache_dtype", "") or gc.NOT_TOLD,
        f"{one}; {two}",
    )


async def _sampling(client: OpenAiEngine, prompt: Sequence[int]) -> tuple[bool | str, str]:
    """A seed gives the same answer again."""
    more: dict[str, Any] = {"temperature": 1.0, "seed": SEED, "ignore_eos": True}
    try:
        one = await client.complete(prompt, max_tokens=SAMPLED_TOKENS, timeout_s=LIMIT_S, **more)
        two = await client.complete(prompt, max_tokens=SAMPLED_TOKENS, timeout_s=LIMIT_S, **more)
    except (InvalidField, Unsupported) as error:
        return gc.NOT_OFFERED, f"seeded sampling refused ({error})"
    same = one.token_ids == two.token_ids
    return same, f"seed {SEED} gave {list(one.token_ids)[:4]} and {list(two.token_ids)[:4]}"


async def _structured(client: OpenAiEngine, prompt: Sequence[int]) -> tuple[bool | str, str]:
    """An answer that must be one of two texts is one of them."""
    told: list[str] = []
    refused = 0
    for fields in CHOICE_FIELDS:
        try:
            found = await client.complete(prompt, max_tokens=16, timeout_s=LIMIT_S, **fields)
        except (InvalidField, Unsupported) as error:
            refused += 1
            told.append(f"{next(iter(fields))} refused ({error})")
            continue
        if found.text.strip() in CHOICES:
            return True, f"chose {found.text!r}"
        told.append(f"{next(iter(fields))} answered {found.text[:24]!r}")
    return gc.NOT_OFFERED if refused == len(CHOICE_FIELDS) else False, "; ".join(told)


async def ask_tokenizer(client: OpenAiEngine) -> tuple[tuple[int, ...], str]:
    """Tokens of a text, and the text they are turned back into ("" when it cannot be asked).

    Raises:
        Unavailable, InvalidField, Unsupported: it does not tokenize.
    """
    tokens = await client.tokenize(TEXT)
    try:
        doc = await client.post(
            "/detokenize", {"model": client.model, "tokens": list(tokens)}, timeout_s=LIMIT_S
        )
    except (InvalidField, Unsupported):
        return tokens, ""
    return tokens, str(doc.get("prompt", ""))


def tokens_wanted(tokenizer: bytes) -> tuple[int, ...] | None:
    """What the text's tokens must be by the artifact's tokenizer; None where that is not known here.

    Byte tokenizers are small enough to be known; others are compared by their round trip.
    """
    try:
        doc = json.loads(tokenizer)
    except ValueError:
        return None
    if (
        not isinstance(doc, dict)
        or doc.get("type") != "bytes"
        or type(doc.get("offset")) is not int
    ):
        return None
    return tuple(byte + doc["offset"] for byte in TEXT.encode())


def with_basics(check: CheckResult, asked: Asked, manifest: Manifest | None) -> CheckResult:
    """The basics check with what was asked, failing where an answer says so."""
    reasons = [] if check.passed else [check.reason]
    if asked.sampling is False:
        reasons.append("a seeded answer does not repeat")
    if asked.structured is False:
        reasons.append("structured outputs are not kept to")
    wanted = "" if manifest is None else manifest.quantisation
    if wanted and asked.quantisation not in (gc.NOT_TOLD, wanted):
        reasons.append(f"quantisation {asked.quantisation}, manifest {wanted}")
    evidence = {
        **check.evidence,
        "sampling": asked.sampling,
        "structured": asked.structured,
        "quantisation": asked.quantisation,
        "kv_dtype": asked.kv_dtype,
        "detail": f"{check.evidence.get('detail', '')}; {asked.detail}",
    }
    why = "; ".join(r for r in reasons if r)
    return CheckResult(check.name, not reasons, evidence, f"{why} ({asked.detail})" if why else "")


def with_tokenizer(
    check: CheckResult, tokens: Sequence[int], back: str, wanted: Sequence[int] | None
) -> CheckResult:
    """The tokenizer check with what the engine makes of a text."""
    evidence = {
        **check.evidence,
        "text": TEXT,
        "text_token_ids": list(tokens),
        "round_trip": back == TEXT if back else gc.NOT_OFFERED,
    }
    reasons = [] if check.passed else [check.reason]
    if back and back != TEXT:
        reasons.append(f"{TEXT!r} comes back as {back!r}")
    if wanted is not None:
        evidence["wanted_token_ids"] = list(wanted)
        if list(wanted) != list(tokens):
            reasons.append(f"the engine reads {list(tokens)[:8]}, the artifact {list(wanted)[:8]}")
    return CheckResult(check.name, not reasons, evidence, "; ".join(r for r in reasons if r))


def with_pool(check: CheckResult, wanted_blocks: int | None) -> CheckResult:
    """The KV pool's check with the size that was ordered, None where the engine measures it."""
    if wanted_blocks is None:
        return check
    evidence = {**check.evidence, "wanted_blocks": wanted_blocks}
    total = check.evidence.get("kv_total_blocks")
    if isinstance(total, int) and total >= gc.KV_BLOCKS_SHARE_MIN * wanted_blocks:
        return replace(check, evidence=evidence)
    why = f"{total} blocks, {wanted_blocks} ordered"
    reason = "; ".join(r for r in (check.reason, why) if r)
    return CheckResult(check.name, False, evidence, reason)


async def amended(
    checks: Sequence[CheckResult],
    client: OpenAiEngine,
    *,
    prompt: Sequence[int],
    arena: Arena | None,
    serving: Serving,
    wanted_tokens: int | None,
    told: Mapping[str, str] | None = None,
) -> list[CheckResult]:
    """The checks with what this module adds to them.

    Args:
        prompt: any tokens. arena: what was loaded, None for an attached engine.
        wanted_tokens: size of the KV pool that was ordered; None where the engine measures it.
        told: `quantisation` and `kv_dtype` as its adapter knows them, beside the engine's metrics.
    """
    manifest = None if arena is None else arena.manifest
    try:
        asked = await ask_basics(client, prompt)
    except Unavailable as error:
        no = gc.NOT_OFFERED
        asked = Asked(no, no, gc.NOT_TOLD, gc.NOT_TOLD, f"not asked ({error})")
    if told and asked.quantisation == gc.NOT_TOLD:
        asked = replace(asked, quantisation=told.get("quantisation", gc.NOT_TOLD))
    if told and asked.kv_dtype in (gc.NOT_TOLD, gc.KV_DTYPE_AUTO):
        asked = replace(asked, kv_dtype=told.get("kv_dtype", asked.kv_dtype))
    if manifest is None and asked.structured is False:
        # Nobody ordered this engine: what it does not offer, requests to it do without.
        asked = replace(asked, structured=gc.NOT_OFFERED)
    out = []
    for check in checks:
        if check.name == gc.BASICS:
            found = with_basics(check, asked, manifest)
        elif check.name == gc.TOKENIZER_REVISION and arena is not None:
            found = await _tokenizer(check, client, arena)
        elif check.name == gc.KV_POOL and wanted_tokens is not None:
            found = with_pool(check, wanted_tokens // serving.block_size)
        else:
            found = check
        out.append(found)
    return out


async def _tokenizer(check: CheckResult, client: OpenAiEngine, arena: Arena) -> CheckResult:
    files = [entry.path for entry in arena.manifest.files if entry.purpose == "tokenizer"]
    if not files:
        return check
    try:
        tokens, back = await ask_tokenizer(client)
    except ReadyplaneError as error:
        return replace(check, evidence={**check.evidence, "detail": f"not asked ({error})"})
    return with_tokenizer(check, tokens, back, tokens_wanted(bytes(arena.view(files[0]))))
