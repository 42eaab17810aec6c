"""HybridLinearKVPool: the KV pool of a model in which only some layers attend, and the states of the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from kvjax.operation import state, static
from kvjax.pools import MHATokenToKVPool, MLATokenToKVPool
from kvjax.recurrent.mamba import MambaPool

KVPool = MHATokenToKVPool | MLATokenToKVPool


@state
class HybridLinearKVPool:
    """Full-attention layers in a dense KV pool, recurrent layers in a MambaPool (SGLang: HybridLinearKVPool).

    Layers are named by global id everywhere; a layer may be in both (attention and state space side by side). The
    token side (size, page_size, bytes per token) is the KV pool's; slots of the states are the request table's.
    """

    full_kv_pool: KVPool  # one layer for each entry of `full_attention_layer_ids`
    mamba: MambaPool
    full_attention_layer_ids: tuple[int, ...] = static()  # global ids, ascending

    @classmethod
    def create(
        cls, full_kv_pool: KVPool, mamba: MambaPool, full_attention_layer_ids: Sequence[int]
    ) -> HybridLinearKVPool:
        """ValueError unless there is one ascending layer id for each layer of the KV pool, which starts at layer 0."""
        if not isinstance(full_kv_pool, KVPool) or not isinstance(mamba, MambaPool):
            raise ValueError(
                f"a hybrid pool is made of an MHA or MLA pool and a MambaPool, got {type(full_kv_pool).__name__} and "
                f"{type(mamba).__name__}; pass HybridLinearKVPool.create(kv_pool, mamba_pool, layer_ids)."
            )
        ids = tuple(full_attention_layer_ids)
        bad = any(isinstance(i, bool) or not isinstance(i, (int, np.integer)) or i < 0 for i in ids)
        if bad or any(a >= b for a, b in itertools.pairwise(ids)):
            raise ValueError(
                f"full_attention_layer_ids must be ascending layer ids, each once, got {ids!r}; sort them."
            )
        if len(ids) != full_kv_pool.num_layers or full_kv_pool.start_layer != 0:
            raise ValueError(
                f"{len(ids)} attention layers {ids} need a KV pool of {len(ids)} layers that starts at layer 0, but it "
                f"has {full_kv_pool.num_layers} from layer {full_kv_pool.start_layer}; the ids are mapped here."
            )
        return cls(full_kv_pool, mamba, tuple(int(i) for i in ids))

    @property
    def full_attention_layer_id_mapping(self) -> dict[int, int]:
        """Layer of the KV pool for each global id."""
        return {layer: index for index, layer in enumerate(self.full_attention_layer_ids)}

    @property
    def size(self) -> int:
        """Tokens."""
        return self.full_kv_pool.size

    @property
    def page_size(self) -> int:
        return self.full_kv_pool.page_size

    @property
    def slots(self) -> int:
        """Rows of each KV leaf: size + page_size."""
        return self.full_kv_pool.slots

    @property
    def dtype(self) -> np.dtype:
        """What keys and values mean."""
        return self.full_kv_pool.dtype

    @property
    def num_layers(self) -> int:
        """Full-attention layers."""
        return self.full_kv_pool.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.full_kv_pool.nbytes + self.mamba.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over the full-attention layers; recurrent layers cost nothing per token."""
        return self.full_kv_pool.bytes_per_token

    def get_kv_size_bytes(self) -> tuple[int, ...]:
        """Bytes per kind of KV buffer; the states are `mamba.nbytes`."""
        return self.full_kv_pool.get_kv_size_bytes()

    def layer_index(self, layer_id: int) -> int:
        """Layer of the KV pool for a global id; ValueError for a layer that does not attend."""
        try:
            return self.full_attention_layer_ids.index(layer_id)
        except ValueError:
            raise ValueError(
                f"layer {layer_id} is no full-attention layer of this pool, which holds layers "
                f"{', '.join(map(str, self.full_attention_layer_ids))}; layer ids are global."
            ) from None

    # The KV side, by global layer id.

    def set_kv_buffer(self, layer_id: int, *args: Any, **kwargs: Any) -> HybridLinearKVPool:
        """The KV pool's `set_kv_buffer` for a global layer id."""
        return self._with(self.full_kv_pool.set_kv_buffer(self.layer_index(layer_id), *args, **kwargs))

    def set_kv_buffer_prefix_valid(self, layer_id: int, *args: Any, **kwargs: Any) -> HybridLinearKVPool:
        """The MHA pool's `set_kv_buffer_prefix_valid` for a global layer id."""
        pool = _of(MHATokenToKVPool, self.full_kv_pool, "set_kv_buffer_prefix_valid")
        return self._with(pool.set_kv_buffer_prefix_valid(self.layer_index(layer_id), *args, **kwargs))

    def set_mla_kv_buffer(self, layer_id: int, *args: Any, **kwargs: Any) -> HybridLinearKVPool:
        """The MLA pool's `set_mla_kv_buffer` for a global layer id."""
        pool = _of(MLATokenToKVPool, self.full_kv_pool, "set_mla_kv_buffer")
        return self._with(pool.set_mla_kv_buffer(self.layer_index(layer_id), *args, **kwargs))

    def move_kv_cache(self, dst: Any, src: Any) -> HybridLinearKVPool:
        """The KV pool's `move_kv_cache`: attention only, states belong to no token."""
        return self._with(self.full_kv_pool.move_kv_cache(dst, src))

    def read(self, layer_id: int, loc: Any) -> tuple[jax.Array, jax.Array]:
        """The KV pool's `read` for a global layer id."""
        return self.full_kv_pool.read(self.layer_index(layer_id), loc)

    def get_key_buffer(self, layer_id: int) -> jax.Array:
        """The stored K (or latent) leaf of a layer, whole, in store_dtype: for kernels."""
        return self.full_kv_pool.get_key_buffer(self.layer_index(layer_id))

    def get_value_buffer(self, layer_id: int) -> jax.Array:
        """The stored V leaf of a layer of an MHA pool, whole, in store_dtype: for kernels."""
        pool = _of(MHATokenToKVPool, self.full_kv_pool, "get_value_buffer")
        return pool.get_value_buffer(self.layer_index(layer_id))

    def get_kv_buffer(self, layer_id: int) -> tuple[jax.Array, jax.Array]:
        """Both stored leaves of a layer of an MHA pool."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    # The state side, by global layer id.

    def read_state(self, layer_id: int, slots: Any) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """The MambaPool's `read`: (convolution states, temporal state or None) of slots i32[m]."""
        return self.mamba.read(layer_id, slots)

    def write_state(self, layer_id: int, slots: Any, conv: Sequence[Any], temporal: Any = None) -> HybridLinearKVPool:
        """The MambaPool's `write`: states of slots i32[m]."""
        return self.with_mamba(self.mamba.write(layer_id, slots, conv, temporal))

    def with_mamba(self, mamba: MambaPool) -> HybridLinearKVPool:
        """The pool with these states instead."""
        return dataclasses.replace(self, mamba=mamba)

    def _with(self, full_kv_pool: Any) -> HybridLinearKVPool:
        return dataclasses.replace(self, full_kv_pool=full_kv_pool)


def _of(kind: Any, pool: KVPool, call: str) -> Any:
    if not isinstance(pool, kind):
        raise ValueError(f"{call} needs an {kind.__name__} inside, but this hybrid pool holds a {type(pool).__name__}.")
    return pool
