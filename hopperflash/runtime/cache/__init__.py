"""The compile cache on disk: see docs/cache.md."""

from hopperflash.runtime.cache.key import CacheKey, key_of
from hopperflash.runtime.cache.lookup import obtain, own_store, seed_store, size_limit
from hopperflash.runtime.cache.store import Entry, Store, Unusable

__all__ = [
    "CacheKey",
    "Entry",
    "Store",
    "Unusable",
    "key_of",
    "obtain",
    "own_store",
    "seed_store",
    "size_limit",
]
