"""Convertible decoders: decode workers that may also take prefill work, in short chunks.

Owns the bound and the price, for agent, planner and simulator alike. The engine computes at most CHUNK_TOKENS of a prompt in one iteration, so that the
sequences that decode there wait for one short chunk at a time; the router is told the times that
follow, so that it takes such a worker only where the prefill pool is slower still, and never for
more than its `prefill_ahead_s` of promised work.
"""

from __future__ import annotations

from dataclasses import replace

from readyplane.core.profile import ClassProfile

CHUNK_TOKENS = 512
CONTEXT = 1024.0
SHARE_DECODING = 0.5


def chunk_tokens(profile: ClassProfile) -> int:
    """Tokens of one chunk; an engine needs room for a token of each of its sequences."""
    return min(profile.max_batch_tokens, max(CHUNK_TOKENS, profile.max_num_seqs + 1))


def engine_profile(profile: ClassProfile) -> ClassProfile:
    """What the engine runs: the same times, shorter chunks."""
    return replace(profile, max_batch_tokens=chunk_tokens(profile))


def told_profile(profile: ClassProfile, *, tpot_s: float) -> ClassProfile:
    """What the router is told: prefill in chunks between the iterations of a half-full decoder.

    Half-full by the time per output token that is to be kept. A name of its own keeps what the
    router learns of these workers apart from what it learns of the prefill pool, and one for each
    `tpot_s` keeps it true when the target changes while older workers serve.
    """
    chunk = chunk_tokens(profile)
    sequences = SHARE_DECODING * profile.decode_sequences(tpot_s=tpot_s, context=CONTEXT)
    iteration_s = profile.iteration_s(sequences, sequences * CONTEXT)
    points = tuple(
        (tokens, 1000.0 / profile.slow_factor * _chunked_s(profile, tokens, chunk, iteration_s))
        for tokens, _ in profile.prefill_points
    )
    return replace(
        profile,
        name=f"{profile.name}-convertible-{1000.0 * tpot_s:g}ms",
        prefill_points=points,
        max_batch_tokens=chunk,
    )


def _chunked_s(profile: ClassProfile, tokens: float, chunk: int, iteration_s: float) -> float:
    done, seconds = 0.0, 0.0
    while done < tokens:
        size = min(float(chunk), tokens - done)
        seconds += profile.prefill_s(size, done) + iteration_s
        done += size
    return seconds
