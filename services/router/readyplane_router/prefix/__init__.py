"""Which worker holds which KV prefix: an index over the KV events of all workers of a model.

`index` owns what is believed of whom, `chains` the blocks themselves.
"""

from readyplane_router.prefix.index import Counts, Limits, PrefixIndex

__all__ = ["Counts", "Limits", "PrefixIndex"]
