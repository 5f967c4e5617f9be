"""The registry's metrics: their names, labels and meaning, bound once.

Owns the catalogue of `readyplane_registry_*`; the use-cases count through `Tally` and know no
Prometheus.
"""

from __future__ import annotations

from readyplane.kit.telemetry import Metrics

PREFIX = "readyplane_registry_"
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "publishes": ("Manifests that came to be published: created, known, refused", ("outcome",)),
    "conflicts": ("Writers that came second", ("what",)),
    "resolves": ("References asked for: found, unknown, mismatch, refused", ("outcome",)),
    "signatures": ("Signatures of manifests that were stored", ()),
    "untrusted": ("Manifests judged without the signatures that were asked for", ("mode",)),
    "evictions": ("Blobs that collection came to: evicted, rescued, failed", ("outcome",)),
    "evicted_bytes": ("Bytes that collection took from the store", ()),
    "verifications": ("Artifacts whose stored bytes were read again: ok, corrupt", ("outcome",)),
    "transfers": (
        "Transfers that readers gave back, by tier and outcome (late_: after the place expired)",
        ("tier", "outcome"),
    ),
    "transferred_bytes": ("Bytes that readers reported, by tier of the source", ("tier",)),
    "places_refused": ("Readers who got no place at a source, by the error's name", ("why",)),
    "bars": ("Sources barred after a report: corrupt, dead, slow", ("tier", "outcome")),
    "quarantines": ("Sources barred for giving wrong bytes", ("tier",)),
    "degraded": ("What went on without a store: plan, transfer, use", ("what",)),
    "served_bytes": ("Bytes of artifacts served over HTTP", ()),
    "redirects": ("Readers who were sent to the object store itself", ()),
    "store_calls": (
        "Calls to the object store: ok, retried, failed, by what was to be done",
        ("what", "outcome"),
    ),
    "uploads": ("Blobs that came in over HTTP: stored, known, refused", ("outcome",)),
}


class PrometheusTally:
    """See `readyplane_registry.fetching.Tally`."""

    def __init__(self, metrics: Metrics) -> None:
        self._counters = {
            name: metrics.counter(PREFIX + name, text, labels)
            for name, (text, labels) in COUNTERS.items()
        }
        self._sources = metrics.gauge(PREFIX + "sources", "Live sources of bytes")
        self._readers = metrics.gauge(PREFIX + "source_readers", "Readers' places taken")

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter of the catalogue above."""
        self._counters[name].labels(**labels).inc(amount)

    def live(self, sources: int, readers: int) -> None:
        """Set the gauges."""
        self._sources.labels().set(sources)
        self._readers.labels().set(readers)
