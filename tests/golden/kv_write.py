"""Replay of recorded buffer writes (kv_write_*.json + .npz): every operation, byte for byte.

All operations of a file run at the file's widest shapes, inside jit, with the pool donated. Lanes that pad a call
write NaN to location 0, so that anything of them that landed would show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pools import MHATokenToKOnlyPool, MHATokenToKVPool, MLATokenToKVPool
from tests.golden import traces

KEYS = {"system", "kind", "config", "source", "seed", "ops"}
LATER = {"dsa_index", "mla_packed_fp8"}  # kinds of pools that are replayed elsewhere
COMMON = {"size", "page_size", "dtype", "layer_num", "rows"}
OPTIONAL = {"start_layer", "kv_size_bytes"}


class Arrays:
    """Arrays of one file by reference; knows which were never asked for."""

    def __init__(self, path: Path):
        with np.load(path) as archive:
            self.stored = dict(archive)
        self.unused = set(self.stored)

    def __call__(self, reference: dict[str, Any]) -> np.ndarray:
        """The array, in the dtype that the reference names: other than float32 and integers it lies there as bytes."""
        assert set(reference) == {"npz", "dtype", "shape"}, f"unknown reference {reference}"
        self.unused.discard(reference["npz"])
        array = self.stored[reference["npz"]]
        dtype, shape = jnp.dtype(reference["dtype"]), tuple(reference["shape"])
        if array.dtype != dtype:
            assert array.dtype == np.uint8, f"{reference}: stored as {array.dtype}"
            assert array.shape == (*shape[:-1], shape[-1] * dtype.itemsize), f"{reference}: stored {array.shape}"
            array = np.frombuffer(array.tobytes(), dtype).reshape(shape)
        assert array.shape == shape, f"{reference}: stored {array.shape}"
        return array


class Replay:
    """One file being replayed: the pool, the fixed shapes, and the jitted operations."""

    def __init__(self, path: Path):
        doc = traces.load_json(path)
        assert set(doc) == KEYS, f"unknown keys {set(doc) ^ KEYS}"
        assert doc["system"] == "kv_write"
        self.name, self.kind, self.config, self.ops = path.name, doc["kind"], doc["config"], doc["ops"]
        self.arrays = Arrays(traces.arrays_of(path))
        self.pool = create(self.kind, self.config)
        self.width = self._widest(lambda a: [len(a.get(n, ())) for n in ("loc", "tgt_loc", "src_loc")])
        self.lanes = self._widest(lambda a: [len(a.get("loc_2d", ()))])
        self.steps = self._widest(lambda a: [len(row) for row in a.get("loc_2d", ())])
        self.jitted: dict[str, Any] = {}
        self.signatures: dict[str, set[Any]] = {}

    def _widest(self, lengths: Callable[[dict[str, Any]], list[int]]) -> int:
        return max([1, *(n for op in self.ops for n in lengths(op["args"]))])

    def run(self) -> None:
        config, pool = self.config, self.pool
        assert pool.slots == config["rows"]
        assert pool.num_layers == config["layer_num"]
        if "kv_size_bytes" in config:
            assert list(pool.get_kv_size_bytes()) == config["kv_size_bytes"]
        assert self.ops, "no operation recorded"
        for index, op in enumerate(self.ops):
            where = f"{self.name} op {index} {op['op']}"
            assert set(op) <= {"op", "args", "after", "note"}, f"{where}: unknown keys {set(op)}"
            assert op.get("note") in (None, "loc 0 is skipped: slot 0 keeps its bytes"), f"{where}: {op['note']}"
            self.step(op["op"], op["args"])
            self.compare(where, op["after"])
        self.read_back()
        assert not self.arrays.unused, f"arrays that no operation names: {sorted(self.arrays.unused)}"
        for method, fn in self.jitted.items():
            assert fn._cache_size() == len(self.signatures[method]), f"{method} was retraced"

    def step(self, name: str, args: dict[str, Any]) -> None:
        get, layer = self.arrays, args.get("layer")
        match self.kind, name, sorted(args):
            case "mha", "set_kv_buffer", ["k", "k_scale", "layer", "loc", "v", "v_scale"]:
                rows = self.rows(get(args["k"])), self.rows(get(args["v"]))
                self.call(name, layer, self.slots(args["loc"]), *rows, args["k_scale"], args["v_scale"])
            case "mha", "set_kv_buffer_prefix_valid", ["commit_lens", "k", "layer", "loc_2d", "v"]:
                loc = np.zeros((self.lanes, self.steps), np.int32)
                lens = np.zeros(self.lanes, np.int32)
                table = np.asarray(args["loc_2d"], np.int32).reshape(len(args["loc_2d"]), -1)
                loc[: table.shape[0], : table.shape[1]] = table
                lens[: table.shape[0]] = args["commit_lens"]
                grids = (self.grid(get(args[key]), table.shape) for key in ("k", "v"))
                self.call(name, layer, loc, lens, *grids)
            case "mla", "set_mla_kv_buffer", ["k_nope", "k_rope", "layer", "loc"]:
                rows = self.rows(get(args["k_nope"])), self.rows(get(args["k_rope"]))
                self.call(name, layer, self.slots(args["loc"]), *rows)
            case "mla", "set_kv_buffer", ["k", "layer", "loc"]:
                self.call(name, layer, self.slots(args["loc"]), self.rows(get(args["k"])))
            case "k_only", "set_k_buffer", ["k", "loc", "local_layer"]:
                layer = args["local_layer"] + self.config["start_layer"]
                self.call(name, layer, self.slots(args["loc"]), self.rows(get(args["k"])))
            case _, "move_kv_cache", ["src_loc", "tgt_loc"]:
                self.call(name, None, self.slots(args["tgt_loc"]), self.slots(args["src_loc"]))
            case _:
                raise AssertionError(f"unknown operation {name} with {sorted(args)} on {self.kind}")

    def call(self, method: str, layer: int | None, *args: Any) -> None:
        """pool.method(layer, *args) in one donating program for each method, layer and input dtype."""
        if method not in self.jitted:
            self.jitted[method] = jax.jit(
                lambda pool, args, layer: getattr(pool, method)(*(() if layer is None else (layer,)), *args),
                static_argnames="layer",
                donate_argnums=0,
            )
        described = tuple(None if a is None else getattr(a, "dtype", float) for a in args)
        self.signatures.setdefault(method, set()).add((layer, described))
        self.pool = self.jitted[method](self.pool, args, layer=layer)

    def slots(self, loc: list[int]) -> np.ndarray:
        assert len(loc) <= self.width
        return np.asarray(loc + [0] * (self.width - len(loc)), np.int32)

    def rows(self, values: np.ndarray) -> np.ndarray:
        return padded(values, self.width)

    def grid(self, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Rows of a [b, t] call laid out for the file's widest b and t."""
        out = padded(values[:0], self.lanes * self.steps).reshape(self.lanes, self.steps, *values.shape[1:])
        out[: shape[0], : shape[1]] = values.reshape(*shape, *values.shape[1:])
        return out.reshape(-1, *values.shape[1:])

    def compare(self, where: str, after: dict[str, Any]) -> None:
        kinds = {"mha": ("k", "v"), "mla": ("kv",), "k_only": ("k",)}[self.kind]
        assert sorted(after) == sorted(kinds), f"{where}: unknown buffers {sorted(after)}"
        for name in kinds:
            buffers = getattr(self.pool, name)
            assert len(after[name]) == len(buffers), f"{where}: {len(after[name])} layers of {name} recorded"
            for layer, (reference, buffer) in enumerate(zip(after[name], buffers, strict=True)):
                recorded, seen = self.arrays(reference), np.asarray(buffer)
                assert recorded.shape == seen.shape, f"{where}: {name} has shape {seen.shape}"
                # SGLang's CPU path writes slot 0 of these kinds, where its other paths and kvjax skip it.
                first = 0 if self.kind == "mla" else 1
                wrong = np.nonzero((octets(recorded) != octets(seen)).any(axis=-1)[first:])[0] + first
                assert not wrong.size, f"{where}: {name} of layer {layer} differs in slots {wrong.tolist()}"
                assert not octets(seen)[0].any(), f"{where}: {name} of layer {layer} wrote to slot 0"

    def read_back(self) -> None:
        """What `read` gives at the end is what the leaves hold."""
        pool, every = self.pool, np.arange(self.pool.slots)
        for layer in range(pool.start_layer, pool.start_layer + pool.num_layers):
            read, leaf = pool.read(layer, every), np.asarray(pool.get_key_buffer(layer))
            assert (octets(read if self.kind == "k_only" else read[0]) == octets(leaf)).all()
            if isinstance(pool, MHATokenToKVPool):
                assert (octets(read[1]) == octets(pool.get_value_buffer(layer))).all()
            elif isinstance(pool, MLATokenToKVPool):
                assert (octets(read[1]) == octets(read[0][..., : pool.kv_lora_rank])).all()


def create(kind: str, config: dict[str, Any]) -> Any:
    """The pool that a file's config describes; an unknown kind or key is a failure."""
    kinds = {
        "mha": ({"head_num", "head_dim", "v_head_dim"}, MHATokenToKVPool.create),
        "mla": ({"kv_lora_rank", "qk_rope_head_dim"}, MLATokenToKVPool.create),
        "k_only": ({"head_num", "head_dim"}, MHATokenToKOnlyPool.create),
    }
    assert kind in kinds, f"unknown kind of pool {kind!r}"
    own, make = kinds[kind]
    assert COMMON | own <= set(config) <= COMMON | own | OPTIONAL, f"config keys {sorted(config)} of a {kind} pool"
    names = {"head_num": "num_kv_heads", "layer_num": "num_layers"}
    given = {names.get(key, key): config[key] for key in config if key not in ("rows", "kv_size_bytes")}
    return make(**given)


def padded(values: np.ndarray, length: int) -> np.ndarray:
    """values, then rows of NaN up to `length`."""
    assert len(values) <= length
    tail = np.full((length - len(values), *values.shape[1:]), np.nan, values.dtype)
    return np.concatenate([values, tail])


def octets(array: Any) -> np.ndarray:
    """uint8[len(array), ...]: the bytes of each row."""
    array = np.asarray(array)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(len(array), -1)
