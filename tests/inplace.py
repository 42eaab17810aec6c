"""Is a donated state updated in place? Asked of the compiled program, not of a clock."""

import os
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import lax

# Whether XLA splits a read over threads shows only where there are threads: on one core such a test would say nothing.
needs_two_cores = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: nothing is ever split over threads")


def assert_in_place(step: Callable[..., Any], state: Any, *args: Any, temp: int) -> None:
    """`step(state, *args) -> state`, alone and in a scan: every byte of the donated state is given on to the result,
    and the program needs at most `temp` bytes beside it."""

    def loop(carry: Any, *more: Any) -> Any:
        return lax.scan(lambda c, _: (step(c, *more), None), carry, None, length=3)[0]

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    for name, fn in (("step", step), ("scan", loop)):
        memory = jax.jit(fn, donate_argnums=0).lower(state, *args).compile().memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes >= size, f"{name}: only {memory.alias_size_in_bytes} of {size} bytes aliased"
        assert memory.temp_size_in_bytes <= temp, f"{name}: {memory.temp_size_in_bytes} temporary bytes, state {size}"
