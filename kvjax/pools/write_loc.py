"""Where a KV write goes: locations, their translations, and whether they are physical."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax.operation import int32, narrow


@dataclasses.dataclass(frozen=True)
class KVWriteLoc:
    """Write locations of one batch (SGLang's KVWriteLoc).

    `swa_loc` and `full_loc` are cut to the length of `loc` when they are longer: a padded batch may carry longer
    ones. A shorter one is a ValueError. Only a KVWriteLoc with `physical=True` passes a pool that demands physical
    locations; a bare array never does.
    """

    loc: Any  # i32[n]
    swa_loc: Any = None  # i32[n] or None: the same tokens' slots in a sliding-window pool
    full_loc: Any = None  # i32[n] or None: their slots in a full-attention pool, where that differs from loc
    physical: bool = False  # static: the locations are physical slots, not virtual ones

    def __post_init__(self):
        object.__setattr__(self, "loc", _locations("loc", self.loc))
        for name in ("swa_loc", "full_loc"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _cut(name, _locations(name, value), self.loc.shape[0]))


def _locations(name: str, value: Any) -> Any:
    """Host lists and integers as i32[n]; ValueError for another dtype or rank, or an id that does not fit int32."""
    if isinstance(value, jax.ShapeDtypeStruct):  # for lowering without arrays
        return value
    return int32(name, narrow(value), 1)


def _cut(name: str, value: Any, length: int) -> Any:
    if value.shape[0] < length:
        raise ValueError(
            f"{name} has {value.shape[0]} entries but loc has {length}; it needs at least one for each location."
        )
    return value if value.shape[0] == length else value[:length]


def _flatten(write_loc: KVWriteLoc):
    key = jax.tree_util.GetAttrKey
    names = ("loc", "swa_loc", "full_loc")
    return [(key(name), getattr(write_loc, name)) for name in names], write_loc.physical


def _unflatten(physical: bool, leaves: Any) -> KVWriteLoc:
    # Past __post_init__: a tree may carry placeholders (vmap axes, specs) instead of arrays.
    write_loc = object.__new__(KVWriteLoc)
    for name, value in zip(("loc", "swa_loc", "full_loc"), leaves, strict=True):
        object.__setattr__(write_loc, name, value)
    object.__setattr__(write_loc, "physical", physical)
    return write_loc


jax.tree_util.register_pytree_with_keys(KVWriteLoc, _flatten, _unflatten)


def write_loc_is_physical(loc: Any) -> bool:
    """True only for a KVWriteLoc whose flag says so; a bare array makes no such promise."""
    return isinstance(loc, KVWriteLoc) and loc.physical


def unwrap_loc(loc: Any, requires_physical: bool = False, call: str = "set_kv_buffer") -> tuple[Any, Any, Any]:
    """(loc, swa_loc, full_loc) of a KVWriteLoc; a bare array gives (loc, None, None).

    requires_physical: the door of pools whose buffers are addressed by physical slots (unified pools). ValueError
    naming `call` when the locations do not say that they are physical. A host flag: nothing is read from the device.
    """
    if requires_physical and not write_loc_is_physical(loc):
        raise ValueError(
            f"{call} writes to a pool that takes physical locations, but got {_describe(loc)}; translate the "
            "locations first and pass KVWriteLoc(loc, physical=True)."
        )
    if isinstance(loc, KVWriteLoc):
        return loc.loc, loc.swa_loc, loc.full_loc
    return loc, None, None


def _describe(loc: Any) -> str:
    return "KVWriteLoc(physical=False)" if isinstance(loc, KVWriteLoc) else f"a bare {type(loc).__name__}"
