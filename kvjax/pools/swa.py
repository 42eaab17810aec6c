"""SWAKVPool: full-attention layers in one pool, sliding-window layers in another, each with its own size and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.layout import positive
from kvjax.operation import state, static
from kvjax.pools.leaves import first_layer
from kvjax.pools.mha import MHATokenToKVPool
from kvjax.pools.write_loc import unwrap_loc


@state
class SWAKVPool:
    """K and V of a model with two kinds of layers (SGLang: SWAKVPool). Layer ids are global.

    The pool never translates: a full layer is addressed by full slots, a window layer by window slots, in writes and
    in reads. A write carries both in a KVWriteLoc, and each layer takes its own; without `swa_loc` a write to a window
    layer is refused, for full slots lie elsewhere in the window pool.
    """

    full_kv_pool: MHATokenToKVPool | None  # None: every layer slides
    swa_kv_pool: MHATokenToKVPool | None  # None: no layer slides
    full_layers: tuple[int, ...] = static()  # global ids, in the order of the inner pool's layers
    swa_layers: tuple[int, ...] = static()
    size_full: int = static()  # tokens
    size_swa: int = static()  # tokens
    page_size: int = static()

    @classmethod
    def create(
        cls,
        size: int,
        size_swa: int,
        page_size: int,
        full_layers: Sequence[int],
        swa_layers: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        swa_num_kv_heads: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        dtype: Any = jnp.bfloat16,
        store_dtype: Any = None,
    ) -> SWAKVPool:
        """Pools of zeros; sizes as an allocator's `pool_sizes` gives them. The swa_ shapes default to the full ones.

        ValueError for layer ids that repeat or are negative, no layers at all, and what MHATokenToKVPool refuses.
        """
        full, swa = tuple(map(int, full_layers)), tuple(map(int, swa_layers))
        if not full + swa or len({*full, *swa}) != len(full + swa) or min(full + swa) < 0:
            raise ValueError(
                f"full_layers {full} and swa_layers {swa} must name every layer of the model once, by its global id."
            )

        def pool(layers: tuple[int, ...], tokens: int, heads: int, dim: int, v_dim: int | None) -> Any:
            if not layers:
                return None
            return MHATokenToKVPool.create(tokens, page_size, len(layers), heads, dim, v_dim, dtype, store_dtype)

        wide = head_dim if swa_head_dim is None else swa_head_dim
        v_wide = swa_v_head_dim
        if v_wide is None:
            v_wide = v_head_dim if swa_head_dim is None else wide
        return cls(
            full_kv_pool=pool(full, size, num_kv_heads, head_dim, v_head_dim),
            swa_kv_pool=pool(swa, size_swa, swa_num_kv_heads or num_kv_heads, wide, v_wide),
            full_layers=full,
            swa_layers=swa,
            size_full=positive("size", size) if full else 0,
            size_swa=positive("size_swa", size_swa) if swa else 0,
            page_size=positive("page_size", page_size),
        )

    @property
    def size(self) -> int:
        """Tokens: of the smaller inner pool, or of the only one."""
        return min(n for n in (self.size_full, self.size_swa) if n)

    @property
    def sizes(self) -> tuple[int, int]:
        """(full, swa) tokens, 0 for a kind of layer that the model has not; an allocator's `pool_sizes`."""
        return self.size_full, self.size_swa

    @property
    def dtype(self) -> Any:
        return self._any.dtype

    @property
    def num_layers(self) -> int:
        return len(self.full_layers) + len(self.swa_layers)

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """(bytes of a token in the full layers, bytes in the window layers)."""
        full, swa = self.full_kv_pool, self.swa_kv_pool
        return 0 if full is None else full.bytes_per_token, 0 if swa is None else swa.bytes_per_token

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(bytes of all K leaves, bytes of all V leaves), both inner pools."""
        sizes = [p.get_kv_size_bytes() for p in (self.full_kv_pool, self.swa_kv_pool) if p is not None]
        return sum(k for k, _ in sizes), sum(v for _, v in sizes)

    @property
    def nbytes(self) -> int:
        return sum(self.get_kv_size_bytes())

    @property
    def _any(self) -> MHATokenToKVPool:
        pool = self.full_kv_pool or self.swa_kv_pool
        assert pool is not None  # create refuses a pool without layers
        return pool

    def is_swa(self, layer_id: int) -> bool:
        """Whether the layer slides; ValueError for a layer that is in neither list."""
        layer = first_layer(layer_id, 1)  # a Python int >= 0
        if layer in self.swa_layers:
            return True
        if layer in self.full_layers:
            return False
        raise ValueError(
            f"layer {layer} is in neither pool; full layers are {self.full_layers}, window layers {self.swa_layers}."
        )

    def _inner(self, layer_id: int) -> tuple[str, MHATokenToKVPool, int]:
        """(field, inner pool, layer id there) of a global layer id."""
        name, ids = ("swa_kv_pool", self.swa_layers) if self.is_swa(layer_id) else ("full_kv_pool", self.full_layers)
        return name, getattr(self, name), ids.index(int(layer_id))

    def set_kv_buffer(
        self,
        layer_id: int,
        loc: Any,
        k: Any,
        v: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        implementation: str | None = None,
    ) -> SWAKVPool:
        """Store k [n, heads, head_dim] and v of one layer, at `swa_loc` in a window layer, else at `full_loc` or `loc`.

        loc: KVWriteLoc, or i32[n] for full layers alone. ValueError for a window layer without `swa_loc`.
        """
        name, pool, local = self._inner(layer_id)
        plain, swa_loc, full_loc = unwrap_loc(loc, call="set_kv_buffer")
        if name == "swa_kv_pool":
            if swa_loc is None:
                raise ValueError(
                    f"layer {layer_id} slides, but the write has no swa_loc; pass "
                    "KVWriteLoc(loc, swa_loc=...) with the tokens' slots in the window pool."
                )
            target = swa_loc
        else:
            target = plain if full_loc is None else full_loc
        written = pool.set_kv_buffer(local, target, k, v, k_scale, v_scale, implementation)
        return dataclasses.replace(self, **{name: written})

    def move_kv_cache(self, dst: Any, src: Any, swa_dst: Any = None, swa_src: Any = None) -> SWAKVPool:
        """Copy full slots src to dst, and window slots swa_src to swa_dst: i32[n] each, their partners (0: none).

        ValueError when there are window layers and their slots are not given.
        """
        full, swa = self.full_kv_pool, self.swa_kv_pool
        if swa is not None and (swa_dst is None or swa_src is None):
            raise ValueError("window layers move too: pass swa_dst and swa_src, the partners of dst and src.")
        return dataclasses.replace(
            self,
            full_kv_pool=full if full is None else full.move_kv_cache(dst, src),
            swa_kv_pool=swa if swa is None else swa.move_kv_cache(swa_dst, swa_src),
        )

    def read(self, layer_id: int, loc: Any) -> tuple[jax.Array, jax.Array]:
        """(k, v) at slots of the layer's own pool: full slots in a full layer, window slots in a window layer."""
        _, pool, local = self._inner(layer_id)
        return pool.read(local, loc)

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The stored K leaf of a layer, whole, in store_dtype: for kernels."""
        _, pool, local = self._inner(layer_id)
        return pool.get_key_buffer(local)

    def get_value_buffer(self, layer_id: int) -> jax.Array:
        """The stored V leaf of a layer, whole, in store_dtype: for kernels."""
        _, pool, local = self._inner(layer_id)
        return pool.get_value_buffer(local)

    def get_kv_buffer(self, layer_id: int) -> tuple[jax.Array, jax.Array]:
        """Both stored leaves of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)
