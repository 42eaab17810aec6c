"""MHATokenToKVPool: keys and values of multi-head or grouped-query attention, one slot per token."""

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
def _write(k_leaf, v_leaf, loc, commit_lens, k, v, k_scale, v_scale, *, dtype, implementation):
    """New (k_leaf, v_leaf). commit_lens None: loc i32[n], all lanes; else loc i32[b, t], a prefix of each lane."""
    if commit_lens is None:
        loc, valid = leaves.int32("loc", loc, 1), None
    else:
        loc, valid = leaves.prefix_valid(loc, commit_lens)
    k = leaves.rows_of("k", k, loc.shape[0], k_leaf.shape[1:])
    v = leaves.rows_of("v", v, loc.shape[0], v_leaf.shape[1:])
    if k.dtype == dtype:  # SGLang asks K alone, for both scales: input of the pool's dtype is stored as it is
        k_scale = v_scale = None
    return kv_write(
        (k_leaf, v_leaf),
        ((k,), (v,)),
        loc,
        dtype=dtype,
        scales=(k_scale, v_scale),
        valid=valid,
        implementation=implementation,
    )


@state
class MHATokenToKVPool:
    """K and V of each layer, [slots, heads, width] each, slots = size + page_size, page 0 being padding.

    Writes outside the pool and to slot 0 are dropped; `check_locations` reports them to whoever asks. A slot that is
    named twice in one write keeps one of the two rows, undefined which. A write is in place inside a program that
    donates the pool; called eagerly it copies the layer. Within a step, write (or move) first and read afterwards:
    a read that no later write depends on makes XLA keep the old buffer beside the new one, a copy of the layer.
    """

    k: tuple[jax.Array, ...]  # per layer: store_dtype[size + page_size, num_kv_heads, head_dim]
    v: tuple[jax.Array, ...]  # per layer: store_dtype[size + page_size, num_kv_heads, v_head_dim]
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
        v_head_dim: int | None = None,
        dtype: Any = jnp.bfloat16,
        store_dtype: Any = None,
        start_layer: int = 0,
    ) -> MHATokenToKVPool:
        """A pool of zeros. v_head_dim: None means head_dim. store_dtype: None means what the platform writes in place.

        ValueError for sizes below 1, a slot count past int32, a dtype that pools do not hold, or a store_dtype that
        cannot hold it bit for bit. Works under `jax.eval_shape`, for compiling without memory.
        """
        slots, dtype = pool_slots(size, page_size), pool_dtype(dtype)
        layers, heads, k_dim, v_dim = leaves.sizes(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        )
        store = resolve_store_dtype(dtype, store_dtype)
        return cls(
            k=leaves.zero_leaves(layers, slots, (heads, k_dim), store),
            v=leaves.zero_leaves(layers, slots, (heads, v_dim), store),
            size=slots - int(page_size),
            page_size=int(page_size),
            dtype=dtype,
            start_layer=leaves.first_layer(start_layer, layers),
        )

    # Shapes and bytes: Python ints, from the leaves.

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
        """(bytes of all K leaves, bytes of all V leaves)."""
        return leaves.leaf_bytes(self.k), leaves.leaf_bytes(self.v)

    @property
    def nbytes(self) -> int:
        return sum(self.get_kv_size_bytes())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return leaves.row_bytes(self.k) + leaves.row_bytes(self.v)

    def layer_index(self, layer_id: int) -> int:
        """Position of a global layer id; ValueError outside [start_layer, start_layer + num_layers)."""
        return leaves.layer_index(layer_id, self.start_layer, self.num_layers)

    # Writing.

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: Any,
        k: Any,
        v: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        implementation: str | None = None,
    ) -> MHATokenToKVPool:
        """Store k [n, heads, head_dim] and v [n, heads, v_head_dim] at loc, i32[n] or a KVWriteLoc.

        Scales (float or scalar array) divide, in the input's dtype, if K's dtype is not the pool's; input of the
        pool's dtype ignores both (SGLang's rule). `read` does not multiply them back: attention does.
        implementation: of `pallas_kernels.kv_write`; None: one kernel on a GPU, one scatter per buffer elsewhere.
        """
        loc, _, _ = unwrap_loc(loc, self.requires_physical_write_loc, "set_kv_buffer")
        return self._written(layer_id, loc, None, k, v, k_scale, v_scale, implementation)

    def set_kv_buffer_prefix_valid(
        self,
        layer_id: int,
        loc: Any,
        commit_lens: Any,
        k: Any,
        v: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        implementation: str | None = None,
    ) -> MHATokenToKVPool:
        """Store only positions t < commit_lens[b] of loc i32[b, t]; k and v hold b * t tokens, lane after lane."""
        loc, _, _ = unwrap_loc(loc, self.requires_physical_write_loc, "set_kv_buffer_prefix_valid")
        return self._written(layer_id, loc, commit_lens, k, v, k_scale, v_scale, implementation)

    def _written(self, layer_id, loc, commit_lens, k, v, k_scale, v_scale, implementation) -> MHATokenToKVPool:
        # The jitted body sees one layer's leaves: every layer shares one trace, and an eager call copies one layer.
        at = self.layer_index(layer_id)
        k_scale, v_scale = leaves.scale_of("k_scale", k_scale), leaves.scale_of("v_scale", v_scale)
        values = (k, v, k_scale, v_scale)
        k_leaf, v_leaf = _write(
            self.k[at], self.v[at], loc, commit_lens, *values, dtype=self.dtype, implementation=implementation
        )
        return dataclasses.replace(self, k=leaves.replaced(self.k, at, k_leaf), v=leaves.replaced(self.v, at, v_leaf))

    def move_kv_cache(self, dst: Any, src: Any) -> MHATokenToKVPool:
        """Copy slots src i32[n] to dst i32[n] in every layer; every source is read before any target is written."""
        k, v = leaves.move_rows((self.k, self.v), dst, src)
        return dataclasses.replace(self, k=k, v=v)

    # Reading.

    def read(self, layer_id: int, loc: Any) -> tuple[jax.Array, jax.Array]:
        """(k [*loc.shape, heads, head_dim], v [*loc.shape, heads, v_head_dim]) in `dtype`, for loc of any rank.

        Raw values, without a scale. A location outside the pool reads the padding row.
        """
        at = self.layer_index(layer_id)
        k = leaves.read_rows(self.k[at], loc, dtype=self.dtype)
        return k, leaves.read_rows(self.v[at], loc, dtype=self.dtype)

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The stored K leaf of a layer, whole, in store_dtype: for kernels."""
        return self.k[self.layer_index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> jax.Array:
        """The stored V leaf of a layer, whole, in store_dtype: for kernels."""
        return self.v[self.layer_index(layer_id)]

    def get_kv_buffer(self, layer_id: int) -> tuple[jax.Array, jax.Array]:
        """Both stored leaves of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)
