"""Starts that failed, by where they ended and by which error."""

from readyplane.core.startup_failed import ERROR_MAX, FailedStart, alike, common_words


def failed(name: str, ended_in: str, error: str, worker_class: str = "h200") -> FailedStart:
    return FailedStart(name, ended_in, error, 3.0, worker_class, "jit", "prefill")


def test_what_only_one_start_has_does_not_tell_errors_apart() -> None:
    one = failed("p-1", "canary", "p-1: no answer from 10.0.0.3:41177 for sha256:" + "ab" * 32)
    two = failed("p-2", "canary", "p-2: no answer from 10.0.0.3:38021 for sha256:" + "cd" * 32)
    assert common_words(one) == "WORKER: no answer from 10.0.0.3:PORT for ID"
    (both,) = alike([two, one])
    assert (both.count, both.workers, both.ended_in) == (2, ("p-1", "p-2"), "canary")


def test_the_most_frequent_comes_first_and_another_place_is_another_kind() -> None:
    found = alike(
        [
            failed("a", "verify", "wrong bytes"),
            failed("b", "canary", "wrong bytes"),
            failed("c", "canary", "wrong bytes"),
            failed("d", "canary", "wrong bytes", "h100"),
        ]
    )
    told = [(f.count, f.worker_class, f.ended_in) for f in found]
    assert told == [(2, "h200", "canary"), (1, "h100", "canary"), (1, "h200", "verify")]


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert common_words(failed("a", "x", "first\nsecond")) == "first"
    assert len(common_words(failed("a", "x", "e " * 500))) == ERROR_MAX
