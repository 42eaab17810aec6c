"""MHATokenToKOnlyPool: keys without values, for layers that score tokens and attend elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.layout import pool_slots
from kvjax.operation import operation, state, static
from kvjax.pools import leaves
from kvjax.pools.dtypes import pool_dtype, resolve_store_dtype
from kvjax.pools.write_loc import unwrap_loc
from pallas_kernels.kv_write import kv_write


@operation("dtype", "implementation")
def _write(leaf, loc, k, *, dtype, implementation):
    loc = leaves.int32("loc", loc, 1)
    k = leaves.rows_of("k", k, loc.shape[0], leaf.shape[1:])
    (written,) = kv_write((leaf,), ((k,),), loc, dtype=dtype, implementation=implementation)
    return written


@state
class MHATokenToKOnlyPool:
    """K of each layer, [slots, heads, head_dim], slots = size + page_size. No value buffer, so no method for one.

    Layer ids are global everywhere; SGLang's set_k_buffer takes a local one, so a caller who knows that adds
    start_layer. Writes outside the pool and to slot 0 are dropped. Input is cast to the pool's dtype, without a scale.
    """

    k: tuple[jax.Array, ...]  # per layer: store_dtype[size + page_size, num_kv_heads, head_dim]
    size: int = static()  # tokens
    page_size: int = static()  # tokens
    dtype: np.dtype = static()  # what the values mean; leaves may be integers of the same width (dtypes.py)
    start_layer: int = static(default=0)  # global id of the first layer
    requires_physical_write_loc: bool = static(default=False)

    @classmethod
    def create(
        cls,
        size: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        store_dtype: Any = None,
        start_layer: int = 0,
    ) -> MHATokenToKOnlyPool:
        """A pool of zeros. store_dtype: None means what the platform writes in place.

        ValueError for sizes below 1, a slot count past int32, a dtype that pools do not hold, or a store_dtype that
        cannot hold it bit for bit. Works under `jax.eval_shape`.
        """
        slots, dtype = pool_slots(size, page_size), pool_dtype(dtype)
        layers, heads, dim = leaves.sizes(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(
            k=leaves.zero_leaves(layers, slots, (heads, dim), resolve_store_dtype(dtype, store_dtype)),
            size=slots - int(page_size),
            page_size=int(page_size),
            dtype=dtype,
            start_layer=leaves.first_layer(start_layer, layers),
        )

    @property
    def num_layers(self) -> int:
        return len(self.k)

    @property
    def slots(self) -> int:
        """Rows of each leaf: size + page_size. Locations lie in [0, slots)."""
        return self.k[0].shape[-3]

    @property
    def store_dtype(self) -> np.dtype:
        return self.k[0].dtype

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(bytes of all K leaves, 0)."""
        return leaves.leaf_bytes(self.k), 0

    @property
    def nbytes(self) -> int:
        return sum(self.get_kv_size_bytes())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return leaves.row_bytes(self.k)

    def layer_index(self, layer_id: int) -> int:
        """Position of a global layer id; ValueError outside [start_layer, start_layer + num_layers)."""
        return leaves.layer_index(layer_id, self.start_layer, self.num_layers)

    def set_k_buffer(self, layer_id: int, loc: Any, k: Any, implementation: str | None = None) -> MHATokenToKOnlyPool:
        """Store k [n, heads, head_dim] at loc, i32[n] or a KVWriteLoc. implementation: of `pallas_kernels.kv_write`."""
        loc, _, _ = unwrap_loc(loc, self.requires_physical_write_loc, "set_k_buffer")
        at = self.layer_index(layer_id)
        leaf = _write(self.k[at], loc, k, dtype=self.dtype, implementation=implementation)
        return dataclasses.replace(self, k=leaves.replaced(self.k, at, leaf))

    def move_kv_cache(self, dst: Any, src: Any) -> MHATokenToKOnlyPool:
        """Copy slots src i32[n] to dst i32[n] in every layer; every source is read before any target is written."""
        return dataclasses.replace(self, k=leaves.move_rows(self.k, dst, src))

    def read(self, layer_id: int, loc: Any) -> jax.Array:
        """k [*loc.shape, heads, head_dim] in `dtype`, for loc of any rank; outside the pool, the padding row."""
        return leaves.read_rows(self.k[self.layer_index(layer_id)], loc, dtype=self.dtype)

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The stored K leaf of a layer, whole, in store_dtype: for kernels."""
        return self.k[self.layer_index(layer_id)]
