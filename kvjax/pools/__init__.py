"""Third mapping: physical slot -> bytes. The KV pools, their dtypes, and what a write names as its target."""

from kvjax.pools.check import LocationFlags, check_locations
from kvjax.pools.dtypes import decode, default_store_dtype, encode
from kvjax.pools.k_only import MHATokenToKOnlyPool
from kvjax.pools.mha import MHATokenToKVPool
from kvjax.pools.mla import MLATokenToKVPool
from kvjax.pools.swa import SWAKVPool
from kvjax.pools.write_loc import KVWriteLoc, unwrap_loc, write_loc_is_physical

__all__ = [
    "KVWriteLoc",
    "LocationFlags",
    "MHATokenToKOnlyPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "SWAKVPool",
    "check_locations",
    "decode",
    "default_store_dtype",
    "encode",
    "unwrap_loc",
    "write_loc_is_physical",
]
