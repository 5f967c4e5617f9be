"""Traces are read strictly, and the built-in workload has the lengths it claims."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import (
    WorkloadRequest,
    prompt_hashes,
    prompt_tokens,
    stream,
)
from readyplane_lab.workload.trace import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_azure_times_start_at_zero_and_keep_their_gaps(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = read_trace(write(tmp_path / "t.csv", AZURE + rows))
    assert trace.format == "azure"
    assert [r.isl for r in trace.requests] == [374, 396]
    assert trace.requests[0].at_s == 0.0
    assert trace.requests[1].at_s == pytest.approx(4.314579, abs=1e-5)


def test_zstd_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.zst"
    path.write_bytes(
        zstandard.ZstdCompressor().compress((AZURE + "2023-11-16 18:15:46.68,5,6\n").encode())
    )
    assert read_trace(path).requests[0].osl == 6


def test_mooncake_blocks_become_shared_prefixes(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'
    )
    trace = read_trace(write(tmp_path / "m.jsonl", lines), jitter=False)
    first, second = (prompt_tokens(r) for r in trace.requests)
    assert len(first) == 700
    assert (first[:512] == second[:512]).all()
    assert not (first[512:600] == second[512:600]).all()


def test_mooncake_jitter_is_seeded_and_said(tmp_path: Path) -> None:
    line = '{"timestamp": 3000, "input_length": 60, "output_length": 5, "hash_ids": [1]}\n'
    path = write(tmp_path / "m.jsonl", line * 50)
    one, same, other = (read_trace(path, seed=s) for s in (1, 1, 2))
    assert one.requests == same.requests != other.requests
    assert one.span_s > 0.5
    assert "jitter" in one.note
    assert read_trace(path, jitter=False).span_s == 0.0


@pytest.mark.parametrize(
    "text, where",
    [
        (AZURE + "2023-11-16 18:15:46.68,5\n", "line 2"),
        (AZURE + "yesterday,5,6\n", "line 2"),
        (AZURE + "2023-11-16 18:15:46.68,5,6\n2023-11-16 18:15:47.68,-5,6\n", "line 3"),
        (AZURE + "2023-11-16 18:15:46.68,5,99999999999\n", "GeneratedTokens"),
        ("a,b\n1,2\n", "line 1"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\nnonsense\n', "line 2"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}\n', "timestamp"),
        ("", "at least one request"),
        (AZURE, "at least one request"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(InvalidField, match=where):
        read_trace(write(tmp_path / "t", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="nothing-here"):
        read_trace(tmp_path / "nothing-here.csv")


def test_conversation_has_the_published_quantiles() -> None:
    requests = list(conversation(Wave(), seed=3, duration_s=3000))
    isl = np.array([r.isl for r in requests])
    osl = np.array([r.osl for r in requests])
    for got, want in zip(np.quantile(isl, (0.5, 0.9, 0.99)), (1020, 2735, 4142), strict=True):
        assert got == pytest.approx(want, rel=0.06)
    for got, want in zip(np.quantile(osl, (0.5, 0.9, 0.99)), (129, 424, 601), strict=True):
        assert got == pytest.approx(want, rel=0.06)
    assert len(requests) / 3000 == pytest.approx(5.5, rel=0.06)


def test_conversation_shares_prefixes_and_is_deterministic() -> None:
    def draw() -> list[WorkloadRequest]:
        return list(itertools.islice(conversation(Wave(), seed=5), 600))

    requests = draw()
    assert requests == draw()
    seen: set[int] = set()
    hit = total = 0
    for request in requests:
        hashes = sequence_hashes(pack_tokens(prompt_tokens(request).tolist()), 16)
        hit += 16 * len(list(itertools.takewhile(seen.__contains__, hashes)))
        total += request.isl
        seen.update(hashes)
    assert 0.15 < hit / total < 0.6
    assert all(sum(n for _, n in r.parts) == r.isl for r in requests)


def test_a_burst_raises_the_rate_only_while_it_lasts() -> None:
    wave = Wave(2.0, swing=0.0, bursts=((10.0, 20.0, 5.0),))
    at = np.array([r.at_s for r in conversation(wave, seed=1, duration_s=60)])
    inside = ((at >= 10) & (at < 30)).sum() / 20
    outside = ((at < 10) | (at >= 30)).sum() / 40
    assert inside == pytest.approx(10.0, rel=0.35)
    assert outside == pytest.approx(2.0, rel=0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidField, match="rate"):
        conversation(Wave(rate), seed=1)


def test_a_longer_ask_extends_a_shorter_one() -> None:
    assert (stream(9, 5000)[:100] == stream(9, 100)).all()
    assert stream(9, 5000).min() >= 3
    assert stream(9, 5000).max() < 512


@pytest.mark.skipif(not SHARED.exists(), reason=f"public traces are not at {SHARED}")
@pytest.mark.parametrize(
    "name, count",
    [
        ("azure2023_conv.csv.zst", 19366),
        ("azure2023_code.csv.zst", 8819),
        ("mooncake_conversation.jsonl.zst", 12031),
    ],
)
def test_public_traces_are_read_whole(name: str, count: int) -> None:
    trace = read_trace(SHARED / "traces" / name)
    assert len(trace.requests) == count
    assert 3400 < trace.span_s < 3600


def prompt(*parts: tuple[int, int]) -> WorkloadRequest:
    return WorkloadRequest(0, 0.0, sum(length for _, length in parts), 1, parts)


Parts = st.lists(
    st.tuples(st.sampled_from([1, 2, (1 << 63) + 1]), st.integers(0, 2100) | st.integers(0, 40)),
    max_size=5,
)


@given(Parts, Parts, st.integers(0, 5))
def test_prompts_hash_alike_exactly_as_far_as_their_tokens_are_alike(
    one: list[tuple[int, int]], other: list[tuple[int, int]], shared: int
) -> None:
    requests = [prompt(*one), prompt(*one[:shared], *other)]
    by_tokens, by_parts = (
        [sequence_hashes(pack_tokens(prompt_tokens(r)), 16) for r in requests],  # type: ignore[arg-type]
        [prompt_hashes(r, 16) for r in requests],
    )
    for tokens, parts in zip(by_tokens, by_parts, strict=True):
        assert len(parts) == len(tokens) and len(set(parts)) == len(parts)
    alike = [a == b for a, b in zip(*by_tokens, strict=False)]
    assert [a == b for a, b in zip(*by_parts, strict=False)] == alike


def test_a_block_that_goes_on_by_chance_as_its_first_part_would_hashes_like_it() -> None:
    last = int(stream(1, 16)[15])
    seed = next(s for s in itertools.count(2) if int(stream(s, 1)[0]) == last)
    whole, joined = prompt((1, 48)), prompt((1, 15), (seed, 33))
    assert prompt_hashes(joined, 16)[0] == prompt_hashes(whole, 16)[0]
    assert prompt_hashes(joined, 16)[1] != prompt_hashes(whole, 16)[1]
    assert prompt_hashes(prompt((1, 15), (seed + 1, 33)), 16)[0] != prompt_hashes(whole, 16)[0]
