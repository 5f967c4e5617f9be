"""The key of compiled code: its table, what is left out of it, and how two tables differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.compile_environment import LEFT_OUT, review_arguments, review_environment
from readyplane.core.compile_key import (
    ABSENT,
    FACTORS,
    CompileFacts,
    absent,
    compile_key,
    differences,
    kind_of_factor,
    known,
    names_path,
    problems_text,
    unknown,
)
from readyplane.core.identity import ArtifactKind, Manifest

FULL = {name: known(f"value of {name}") for name in FACTORS}


def test_what_is_not_there_is_a_value_and_what_is_not_known_is_a_problem() -> None:
    key = compile_key(CompileFacts({**FULL, "driver": absent(), "mig": unknown("timed out")}))
    assert key.factors["driver"] == ABSENT
    assert "mig" not in key.factors
    assert not key.usable
    assert problems_text(key) == "mig: timed out"


def test_a_factor_called_absent_does_not_pass_for_one_that_is_not_there() -> None:
    here = compile_key(CompileFacts({**FULL, "mig": known(ABSENT)}))
    gone = compile_key(CompileFacts({**FULL, "mig": absent()}))
    odd = compile_key(CompileFacts({**FULL, "mig": known("=absent")}))
    assert len({here.digest, gone.digest, odd.digest}) == 3


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_that_nobody_looked_at_is_named(name: str) -> None:
    key = compile_key(CompileFacts({k: v for k, v in FULL.items() if k != name}))
    assert key.problems == {name: "nobody looked"}


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_an_empty_variable_is_a_problem_and_never_a_value(value: str) -> None:
    key = compile_key(CompileFacts(FULL, {"VLLM_FLASH_ATTN_VERSION": value}))
    assert key.problems == {"env.VLLM_FLASH_ATTN_VERSION": "empty"}


def test_a_path_counts_by_what_lies_there() -> None:
    facts = CompileFacts(FULL, {"VLLM_TUNED_CONFIG_FOLDER": "/mnt/a"})
    assert "path" in compile_key(facts).problems["env.VLLM_TUNED_CONFIG_FOLDER"]
    here, there = (
        compile_key(CompileFacts(FULL, {"VLLM_TUNED_CONFIG_FOLDER": path}, {path: "sha256:1"}))
        for path in ("/mnt/a", "/srv/b")
    )
    assert here.usable
    assert here == there


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/mnt/x", True),
        ("~/x", True),
        ("./x", True),
        ("a=/b/c", True),
        ("x:/y", True),
        ('{"a": "/b"}', True),
        ("-O2 -I/opt/x", True),
        ("-isystem/opt/x", True),
        ("modelled/1", False),
        ("org/model", False),
        ("tcp://host", False),
        ("1/2", False),
        ("", False),
    ],
)
def test_what_names_a_path(text: str, path: bool) -> None:
    assert names_path(text) == path


@pytest.mark.parametrize(
    ("words", "counted", "left_out"),
    [
        (["--max-num-seqs", "7"], {"--max-num-seqs": "7"}, set()),
        (["--max_num_seqs=7"], {"--max-num-seqs": "7"}, set()),
        (["--enforce-eager", "--port", "80"], {"--enforce-eager": "set"}, {"--port"}),
        (["--a", "1", "--a", "2"], {"--a": "1 2"}, set()),
        (["model", "-tp", "2"], {"positional": "model", "-tp": "2"}, set()),
        (
            ["--gpu-memory-utilization=0.9", "--host", "h"],
            {},
            {"--gpu-memory-utilization", "--host"},
        ),
    ],
)
def test_arguments(words: list[str], counted: dict[str, str], left_out: set[str]) -> None:
    found = review_arguments(words)
    assert found.counted == counted
    assert set(found.left_out) == left_out


def test_a_variable_of_no_engine_does_not_count() -> None:
    found = review_environment({"HOME": "/x", "PATH": "/bin", "POD_NAME": "p-1", "CC": "gcc"})
    assert found.counted == {"CC": "gcc"}


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_SERVICE_HOST",
        "VLLM_SERVICE_PORT_HTTP",
        "VLLM_PORT_8000_TCP_ADDR",
        "VLLM_PORT_8000_TCP",
    ],
)
def test_a_clusters_service_links_do_not_count(name: str) -> None:
    assert review_environment({name: "10.0.0.1"}).counted == {}


def test_each_variable_that_is_left_out_says_why() -> None:
    assert all(LEFT_OUT.values())


def test_differences_go_both_ways_and_are_sorted() -> None:
    told = [str(d) for d in differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"})]
    assert told == ["a: 1 != nothing", "b: 2 != 3", "c: nothing != 4"]


# No system gives a program U+0000 in a variable, an argument or a path.
SAID = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(st.dictionaries(st.sampled_from(FACTORS), SAID.map(known), max_size=8))
def test_every_table_is_a_manifests_key(more: dict[str, object]) -> None:
    key = compile_key(CompileFacts({**FULL, **more}))  # type: ignore[dict-item]
    document = Manifest(ArtifactKind.COMPILE, "m", (), key=key.factors).document()
    document["files"] = [{"path": "x", "size_bytes": 0, "sha256": "sha256:" + "0" * 64}]
    document["files"][0]["chunks"] = []
    assert set(Manifest.from_document(document).key) == set(key.factors)


def test_bytes_that_are_no_text_are_still_a_value() -> None:
    odd, other = (
        compile_key(CompileFacts(FULL, {"VLLM_X": value})) for value in ("\udcff", "\udcfe")
    )
    assert odd.usable
    assert odd.digest != other.digest


def test_kinds_of_factors_are_few() -> None:
    assert kind_of_factor("env.VLLM_X") == "environment"
    assert kind_of_factor("argument.--a") == "arguments"
    assert kind_of_factor("driver") == "driver"
