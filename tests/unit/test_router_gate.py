"""The ready gate judges values, lists every reason, and lets nobody in on a claim (R18)."""

from dataclasses import replace
from typing import Any

import pytest

from readyplane.core import gate_checks as gc
from readyplane.core.identity import KvFormat, Manifest
from readyplane.core.worker import CheckResult, Role
from readyplane_lab.simulator.evidence import checks_of
from readyplane_router.gate import (
    Admit,
    Expectations,
    Refuse,
    judge,
    offered_profile,
    url_is_plausible,
)
from tests.router_world import DIGEST, MANIFEST, PROFILE, evidence, offer, serving


def expectations(**changes: Any) -> Expectations:
    good = Expectations(
        offer=offer("p0", Role.PREFILL),
        manifest=MANIFEST,
        epoch=5,
        lease_valid=True,
        group_state="published",
        group_epoch=6,
        profiles={PROFILE.name: PROFILE.digest},
        allow_attached=True,
    )
    return replace(good, **changes)


def reasons(checks: list[CheckResult], want: Expectations | None = None, **serves: Any) -> str:
    verdict = judge(serving(**serves), checks, want or expectations())
    return "; ".join(verdict.reasons) if isinstance(verdict, Refuse) else ""


def good_but(name: str, fields: dict[str, Any] | None) -> list[CheckResult]:
    changed: dict[str, Any] = {name: fields}
    return evidence(5, 6, **changed)


def test_good_evidence_is_admitted() -> None:
    verdict = judge(serving(), evidence(5, 6), expectations())
    assert isinstance(verdict, Admit)
    assert {c.name for c in verdict.checks} == set(gc.GATE_CHECKS)
    assert all(c.passed for c in verdict.checks)


@pytest.mark.parametrize("manifest", [MANIFEST, None])
def test_what_a_simulated_worker_hands_in_is_judged_as_any_other(
    manifest: Manifest | None,
) -> None:
    """With its artifact, and as an engine that nobody saw loading one."""
    want = expectations(
        offer=offer("p0", Role.PREFILL, attached=manifest is None), manifest=manifest
    )
    checks = checks_of(manifest, blocks=10_000, profile=PROFILE, epoch=5, group_epoch=6)
    assert reasons(list(checks), want) == ""
    assert "epoch" in reasons(list(checks), replace(want, epoch=7))


def test_only_who_serves_both_stages_may_do_without_a_connector() -> None:
    none = KvFormat(DIGEST, connector="none")
    checks = good_but(
        gc.KV_CONNECTOR, {"outbound": False, "inbound": False, "detail": "it has none"}
    )
    both = expectations(offer=offer("b0", Role.BOTH))
    assert reasons(checks, both, kv=none) == ""
    assert "not reachable outbound (it has none)" in reasons(checks, kv=none)
    assert "not reachable outbound" in reasons(checks, both)  # it says that it has one


GOOD_BASICS: dict[str, Any] = {
    "eos": True,
    "max_tokens": True,
    "structured": True,
    "sampling": True,
    "quantisation": "none",
    "kv_dtype": "auto",
}
POOL = {"kv_total_blocks": 10_000, "free_blocks": 10_000}
READS: dict[str, Any] = {
    "tokenizer_digest": MANIFEST.tokenizer_digest,
    "text_token_ids": [1],
    "wanted_token_ids": [1],
}


@pytest.mark.parametrize(
    ("held", "owners", "says"),
    [
        ([2, 2], ((), ()), ""),
        ([1, 1], ((0,), (1,)), ""),
        ([1, 2], ((0,), ()), "rank 0 holds 1 tensors, it owns 2"),
        ([2, 0], ((0,), (1,)), "rank 1 holds 0 tensors, it owns 1"),
        ([2], ((), ()), "one number for each of 2 ranks"),
        (None, ((), ()), "one number for each of 2 ranks"),
    ],
)
def test_each_rank_must_hold_what_it_owns(
    held: list[int] | None, owners: tuple[tuple[int, ...], ...], says: str
) -> None:
    """R10.3: 2 ranks of a manifest of two tensors, which is placed for them or not."""
    tensors = tuple(
        replace(tensor, ranks=own) for tensor, own in zip(MANIFEST.tensors, owners, strict=True)
    )
    manifest = replace(MANIFEST, tensors=tensors)
    want = expectations(manifest=manifest, offer=offer("p0", Role.PREFILL, ranks=2))
    told = {"tensors": 2, "tensors_expected": 2, "missing": [], "ranks": 2, "rank_tensors": held}
    verdict = judge(serving(), good_but(gc.SHARD_COVERAGE, told), want)
    (coverage,) = [c for c in verdict.checks if c.name == gc.SHARD_COVERAGE]
    assert coverage.passed is not bool(says)
    assert says in coverage.reason


# Every row claims `passed=True`; the value says otherwise.
@pytest.mark.parametrize(
    ("check", "fields", "words"),
    [
        (gc.MODEL_REVISION, {"manifest_digest": "sha256:" + "f" * 64}, "ordered " + DIGEST),
        (gc.TOKENIZER_REVISION, {"tokenizer_digest": "sha256:" + "f" * 64}, "manifest "),
        (
            gc.TENSOR_CHECKSUMS,
            {"chunks_verified": 2, "chunks_total": 2, "failed": ["a[0]"]},
            "did not match: a[0]",
        ),
        (
            gc.TENSOR_CHECKSUMS,
            {"chunks_verified": 1, "chunks_total": 2, "failed": []},
            "verified 1 of 2",
        ),
        (
            gc.TENSOR_CHECKSUMS,
            {"chunks_verified": 0, "chunks_total": 0, "failed": []},
            "weights have 1",
        ),
        (
            gc.SHARD_COVERAGE,
            {"tensors": 1, "tensors_expected": 2, "missing": ["b"], "ranks": 1},
            "missing: b",
        ),
        (
            gc.SHARD_COVERAGE,
            {"tensors": 1, "tensors_expected": 1, "missing": [], "ranks": 1},
            "manifest lists 2",
        ),
        (
            gc.SHARD_COVERAGE,
            {"tensors": 2, "tensors_expected": 2, "missing": [], "ranks": 2},
            "ranks 2, offered 1",
        ),
        (
            gc.KV_CONNECTOR,
            {"outbound": True, "inbound": False, "detail": "refused"},
            "not reachable inbound (refused)",
        ),
        (
            gc.CANARY,
            {"token_ids": [7, 8, 1], "eos_ok": True, "sampling_ok": True},
            "answered 7, 8, 1, known answer 7, 8, 9",
        ),
        (gc.CANARY, {"token_ids": [], "eos_ok": True, "sampling_ok": True}, "no answer"),
        (
            gc.CANARY,
            {"token_ids": [7, 8, 9], "eos_ok": False, "sampling_ok": "yes"},
            "eos_ok is False",
        ),
        (gc.BASICS, {**GOOD_BASICS, "max_tokens": 1}, "max_tokens is 1"),
        (gc.BASICS, {**GOOD_BASICS, "structured": False}, "structured is False"),
        (gc.BASICS, {**GOOD_BASICS, "sampling": False}, "sampling is False"),
        (gc.BASICS, {**GOOD_BASICS, "quantisation": "fp8"}, "quantisation fp8, manifest none"),
        (gc.BASICS, {**GOOD_BASICS, "kv_dtype": "bf16"}, "KV in bf16, serving says fp8_e4m3"),
        (gc.KV_POOL, {**POOL, "wanted_blocks": 20_000}, "10000 blocks, 20000 ordered"),
        (gc.TOKENIZER_REVISION, {**READS, "round_trip": False}, "does not come back"),
        (
            gc.TOKENIZER_REVISION,
            {**READS, "text_token_ids": [2]},
            "reads a text as 2, the artifact 1",
        ),
        (gc.KV_POOL, {"kv_total_blocks": 10_000, "free_blocks": 100}, "100 of 10000 blocks free"),
        (gc.KV_POOL, {"kv_total_blocks": 9_000, "free_blocks": 9_000}, "serving says 10000"),
        (gc.KV_POOL, {"kv_total_blocks": None, "free_blocks": 1}, "kv_total_blocks is None"),
        (gc.PROFILE, {"name": "other", "digest": PROFILE.digest}, "not registered; known: toy"),
        (gc.PROFILE, {"name": "toy", "digest": "sha256:x"}, "registered " + PROFILE.digest),
        (gc.LEASE, {"epoch": 4}, "the lease has 5"),
        (gc.GROUP, {"group_epoch": 1}, "published 6"),
    ],
)
def test_a_claim_does_not_pass_against_its_value(
    check: str, fields: dict[str, Any], words: str
) -> None:
    found = reasons(good_but(check, fields))
    assert f"{check}: " in found
    assert words in found


@pytest.mark.parametrize("name", list(gc.GATE_CHECKS))
def test_a_check_that_was_not_made_refuses(name: str) -> None:
    assert f"{name}: this check was not made" in reasons(good_but(name, None))


@pytest.mark.parametrize("name", [n for n, f in gc.GATE_CHECKS.items() if f])
def test_evidence_without_its_fields_refuses(name: str) -> None:
    assert f"{name}: evidence lacks" in reasons(good_but(name, {}))


def test_every_reason_is_listed() -> None:
    found = reasons(
        evidence(4, 1, canary={"token_ids": [0], "eos_ok": True, "sampling_ok": True}),
        expectations(lease_valid=False, lease_why="not renewed for 9.0 s"),
    )
    for words in ("canary:", "lease: epoch 4", "not renewed for 9.0 s", "group: group epoch 1"):
        assert words in found


def test_a_failed_check_keeps_its_own_reason() -> None:
    checks = [
        replace(c, passed=False, reason="NIXL said no") if c.name == gc.KV_CONNECTOR else c
        for c in evidence(5, 6)
    ]
    assert reasons(checks) == "kv_connector: NIXL said no"


def test_a_check_sent_twice_and_an_unknown_failed_one_refuse() -> None:
    checks = evidence(5, 6)
    assert "canary: sent twice" in reasons(
        [*checks, next(c for c in checks if c.name == gc.CANARY)]
    )
    assert "thermal: too hot" in reasons([*checks, CheckResult("thermal", False, {}, "too hot")])
    assert reasons([*checks, CheckResult("thermal", True, {})]) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_url": "ftp://x:1"}, "engine_url"),
        ({"engine_url": "http://169.254.169.254/latest"}, "engine_url"),
        ({"engine_url": ""}, "engine_url"),
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"kv": KvFormat(DIGEST, hash_scheme="builtin")}, "hash_scheme: builtin"),  # B95
        ({"kv": KvFormat("sha256:" + "f" * 64)}, "model_digest"),
        ({"kv": KvFormat(DIGEST, block_size=32)}, "block_size: 32 != 16"),
    ],
)
def test_what_it_says_of_itself_is_judged_too(changes: dict[str, Any], words: str) -> None:
    assert words in reasons(evidence(5, 6), **changes)


@pytest.mark.parametrize("state", ["forming", "failed"])
def test_no_group_no_entry(state: str) -> None:
    assert f"the group is {state}" in reasons(evidence(5, 6), expectations(group_state=state))


def test_an_old_generation_is_refused() -> None:
    assert "generation 1 is over" in reasons(evidence(5, 6), expectations(generation_min=2))


def skipped(*names: str) -> dict[str, Any]:
    return {name: {gc.NOT_APPLICABLE: "the engine was already running"} for name in names}


CONSISTENT = {
    "token_ids": [4, 4],
    "repeat_token_ids": [4, 4],
    "eos_ok": True,
    "sampling_ok": True,
}


def test_an_attached_engine_may_skip_what_nobody_can_check() -> None:
    checks = evidence(
        5,
        6,
        canary=CONSISTENT,
        **skipped(*(gc.ATTACHED_MAY_SKIP - {gc.KV_CONNECTOR})),
    )
    attached = expectations(
        offer=offer("p0", Role.PREFILL, attached=True, manifest_digest=""), manifest=None
    )
    assert reasons(checks, attached) == ""
    assert "policy does not allow attached" in reasons(
        checks, replace(attached, allow_attached=False)
    )
    twice = {**CONSISTENT, "repeat_token_ids": [4, 5]}
    other = [replace(c, evidence=twice) if c.name == gc.CANARY else c for c in checks]
    assert "asked again 4, 5" in reasons(other, attached)


def test_nobody_else_may_skip_and_not_everything_may_be_skipped() -> None:
    checks = evidence(5, 6, **skipped(gc.TENSOR_CHECKSUMS))
    assert "only an attached engine may skip" in reasons(checks)
    attached = expectations(offer=offer("p0", Role.PREFILL, attached=True))
    assert "canary: this check may not be skipped" in reasons(
        evidence(5, 6, **skipped(gc.CANARY)), attached
    )
    assert "cannot do without a KV connector" in reasons(
        evidence(5, 6, **skipped(gc.KV_CONNECTOR)), attached
    )
    both = expectations(offer=offer("b0", Role.BOTH, attached=True))
    assert reasons(evidence(5, 6, **skipped(gc.KV_CONNECTOR)), both) == ""


def test_a_profile_that_comes_with_the_evidence_must_be_what_its_digest_says() -> None:
    whole = {"name": "toy", "digest": PROFILE.digest, "document": PROFILE.document()}
    assert offered_profile([CheckResult(gc.PROFILE, True, whole)]) == PROFILE
    lying = {**whole, "document": {**PROFILE.document(), "slow_factor": 0.5}}
    assert offered_profile([CheckResult(gc.PROFILE, True, lying)]) is None


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://host.example", True),
        ("http://[::1]:8000/v1", True),
        ("http://user@host:1", False),
        ("file:///etc/passwd", False),
        ("http://169.254.169.254", False),  # B174
        ("http://[fe80::1]:1", False),
        ("host:8000", False),
        ("http://", False),
    ],
)
def test_urls_that_may_be_dialled(url: str, good: bool) -> None:
    assert url_is_plausible(url) is good
