"""MLATokenToKVPool: one latent per token and layer, from which multi-head latent attention derives K and V."""

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


@operation("dtype", "columns", "implementation")
def _write(leaf, loc, parts, *, dtype, columns, implementation):
    """New leaf. parts: values [n, 1, width] to lay side by side, columns: their ((name, width), ...)."""
    loc = leaves.int32("loc", loc, 1)
    values = tuple(
        leaves.rows_of(name, part, loc.shape[0], (1, width)) for (name, width), part in zip(columns, parts, strict=True)
    )
    (written,) = kv_write((leaf,), (values,), loc, dtype=dtype, implementation=implementation)
    return written


@state
class MLATokenToKVPool:
    """The latent of each layer, [slots, 1, width]: kv_lora_rank columns, then qk_rope_head_dim, then zero padding.

    The value of a token is the first kv_lora_rank columns of its latent. SGLang's value buffer is a view of them;
    JAX has no views: `get_value_buffer` slices a leaf, which copies the layer where it is not fused into its use.
    `read` slices what it gathered, and a kernel takes the latent leaf and reads the columns it needs.
    Writes outside the pool and to slot 0 are dropped. Input is cast to the pool's dtype, without a scale.
    """

    kv: tuple[jax.Array, ...]  # per layer: store_dtype[size + page_size, 1, width]
    size: int = static()  # tokens
    page_size: int = static()  # tokens
    kv_lora_rank: int = static()
    qk_rope_head_dim: int = static()
    dtype: np.dtype = static()  # what the values mean; leaves may be integers of the same width (dtypes.py)
    start_layer: int = static(default=0)  # global id of the first layer
    requires_physical_write_loc: bool = static(default=False)

    @classmethod
    def create(
        cls,
        size: int,
        page_size: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: Any = jnp.bfloat16,
        store_dtype: Any = None,
        start_layer: int = 0,
        width: int | None = None,
    ) -> MLATokenToKVPool:
        """A pool of zeros. qk_rope_head_dim may be 0. width: stored columns, at least rank + rope (the default);
        wider for kernels that want a multiple of 128. The extra columns are counted in bytes, stay 0 and are not read.

        ValueError for sizes below 1, a slot count past int32, a dtype that pools do not hold, a store_dtype that
        cannot hold it bit for bit, or a width below rank + rope. Works under `jax.eval_shape`.
        """
        slots, dtype = pool_slots(size, page_size), pool_dtype(dtype)
        layers, rank = leaves.sizes(num_layers=num_layers, kv_lora_rank=kv_lora_rank)
        rope = 0 if qk_rope_head_dim == 0 else leaves.sizes(qk_rope_head_dim=qk_rope_head_dim)[0]
        columns = rank + rope if width is None else leaves.sizes(width=width)[0]
        if columns < rank + rope:
            raise ValueError(
                f"width {columns} is too narrow for a latent of {rank} + {rope} = {rank + rope} columns; "
                "pass at least that, or None."
            )
        return cls(
            kv=leaves.zero_leaves(layers, slots, (1, columns), resolve_store_dtype(dtype, store_dtype)),
            size=slots - int(page_size),
            page_size=int(page_size),
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            dtype=dtype,
            start_layer=leaves.first_layer(start_layer, layers),
        )

    # Shapes and bytes: Python ints, from the leaves.

    @property
    def num_layers(self) -> int:
        return len(self.kv)

    @property
    def slots(self) -> int:
        """Rows of each leaf: size + page_size. Locations lie in [0, slots)."""
        return self.kv[0].shape[-3]

    @property
    def kv_cache_dim(self) -> int:
        """Columns of a latent: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Stored columns: kv_cache_dim, or more where the pool is padded."""
        return self.kv[0].shape[-1]

    @property
    def store_dtype(self) -> np.dtype:
        return self.kv[0].dtype

    def get_kv_size_bytes(self) -> tuple[int]:
        """(bytes of all latent leaves,): one entry per kind of buffer, like the other pools."""
        return (leaves.leaf_bytes(self.kv),)

    @property
    def nbytes(self) -> int:
        return sum(self.get_kv_size_bytes())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, padding columns included."""
        return leaves.row_bytes(self.kv)

    def layer_index(self, layer_id: int) -> int:
        """Position of a global layer id; ValueError outside [start_layer, start_layer + num_layers)."""
        return leaves.layer_index(layer_id, self.start_layer, self.num_layers)

    # Writing.

    def set_kv_buffer(
        self, layer_id: int, loc: Any, k: Any, v: Any = None, implementation: str | None = None
    ) -> MLATokenToKVPool:
        """Store whole latents k [n, 1, kv_cache_dim] at loc, i32[n] or a KVWriteLoc. v is ignored: it is part of k.

        implementation: of `pallas_kernels.kv_write`; None: one kernel on a GPU, one scatter elsewhere.
        """
        del v
        return self._written("set_kv_buffer", layer_id, loc, implementation, k=(k, self.kv_cache_dim))

    def set_mla_kv_buffer(
        self, layer_id: int, loc: Any, k_nope: Any, k_rope: Any = None, implementation: str | None = None
    ) -> MLATokenToKVPool:
        """Store k_nope [n, 1, kv_lora_rank] beside k_rope [n, 1, qk_rope_head_dim]; no k_rope where that width is 0."""
        parts = {"k_nope": (k_nope, self.kv_lora_rank)}
        if k_rope is not None:
            parts["k_rope"] = (k_rope, self.qk_rope_head_dim)
        elif self.qk_rope_head_dim:
            raise ValueError(
                f"k_rope is missing, but the latents of this pool hold {self.qk_rope_head_dim} rope columns; pass it, "
                "or create the pool with qk_rope_head_dim=0."
            )
        return self._written("set_mla_kv_buffer", layer_id, loc, implementation, **parts)

    def _written(
        self, call: str, layer_id: int, loc: Any, implementation: str | None, **parts: tuple[Any, int]
    ) -> MLATokenToKVPool:
        loc, _, _ = unwrap_loc(loc, self.requires_physical_write_loc, call)
        at = self.layer_index(layer_id)
        leaf = _write(
            self.kv[at],
            loc,
            tuple(values for values, _ in parts.values()),
            dtype=self.dtype,
            columns=tuple((name, width) for name, (_, width) in parts.items()),
            implementation=implementation,
        )
        return dataclasses.replace(self, kv=leaves.replaced(self.kv, at, leaf))

    def move_kv_cache(self, dst: Any, src: Any) -> MLATokenToKVPool:
        """Copy slots src i32[n] to dst i32[n] in every layer; every source is read before any target is written."""
        return dataclasses.replace(self, kv=leaves.move_rows(self.kv, dst, src))

    # Reading.

    def read(self, layer_id: int, loc: Any) -> tuple[jax.Array, jax.Array]:
        """(k [*loc.shape, 1, kv_cache_dim], v [*loc.shape, 1, kv_lora_rank]) in `dtype`, v being columns of k.

        For loc of any rank; a location outside the pool reads the padding row.
        """
        row = leaves.read_rows(self.kv[self.layer_index(layer_id)], loc, dtype=self.dtype)
        return row[..., : self.kv_cache_dim], row[..., : self.kv_lora_rank]

    def get_mla_kv_buffer(self, layer_id: int, loc: Any, dst_dtype: Any = None) -> tuple[jax.Array, jax.Array | None]:
        """(k_nope [*loc.shape, 1, kv_lora_rank], k_rope [*loc.shape, 1, qk_rope_head_dim] or None where that is 0).

        Cast to dst_dtype if one is given.
        """
        row, nope = self.read(layer_id, loc)
        rope = row[..., self.kv_lora_rank :]
        if dst_dtype is not None:
            nope, rope = nope.astype(dst_dtype), rope.astype(dst_dtype)
        return nope, rope if self.qk_rope_head_dim else None

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The stored latent leaf of a layer, whole, padding columns included, in store_dtype: for kernels."""
        return self.kv[self.layer_index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> jax.Array:
        """The first kv_lora_rank columns of the stored leaf (SGLang's get_value_buffer): a slice, so a copy of the
        layer where it is not fused into its use. Kernels take `get_key_buffer` and read the columns that they need."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[jax.Array, jax.Array]:
        """(get_key_buffer, get_value_buffer) of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)
