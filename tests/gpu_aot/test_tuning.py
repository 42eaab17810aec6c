"""Candidates of a search, compiled for an H200: those that are furthest from a default run, too."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from benchmarks import in_place, kernels
from benchmarks.shapes import SHAPES
from benchmarks.tune import attention, write
from kvjax.compat import traced_for
from kvjax.compiled import compile_for, inspect
from kvjax.compiled.resources import compile_for_h200

SHARED = 227 * 1024  # bytes that a block can have on an H200


@pytest.fixture(autouse=True)
def _needs_triton(triton):
    del triton


@pytest.mark.parametrize("title", ["Qwen3-32B decode", "DeepSeek-V3 decode"])
def test_what_is_timed_of_the_last_candidate_of_attention_compiles_and_fits(title, monkeypatch):
    def compiled(calls, _rounds):
        (call,) = calls.values()
        return {"": compile_for_h200(call.func, call.args)}

    make = kernels.arrays
    monkeypatch.setattr(kernels, "arrays", lambda shape: jax.eval_shape(lambda: make(shape)))
    monkeypatch.setattr(kernels, "seconds", compiled)
    with traced_for("NVIDIA H200", 132, "cuda"):
        search = attention(title, SHAPES[title])
        timer = search.timer()
    last = search.candidates[-1]
    _, found = cast(Any, timer(last))
    assert len(found) == (2 if last.splits > 1 else 1)
    assert max(kernel.shared_bytes or 0 for kernel in found) <= SHARED


def test_candidates_of_kv_write_compile_to_one_kernel_each():
    from pallas_kernels.kv_write.triton import kv_write

    shape = SHAPES["Llama-3-8B decode"]
    with traced_for("NVIDIA H200", 132, "cuda"):
        leaves, values, loc = in_place.write_shapes(shape)
        searched = write("", shape, jnp.bfloat16).candidates
    for config in (searched[1], searched[-1]):

        def run(leaves, values, loc, config=config):
            return kv_write(leaves, values, (None, None), loc, None, dtype=jnp.dtype(jnp.bfloat16), config=config)

        _, (kernel,) = compile_for_h200(run, (leaves, values, loc), donate_argnums=0)
        assert kernel.spill_bytes == 0


@pytest.mark.parametrize("name", ["triton", "copy"])
def test_the_programs_that_time_a_write_are_one_kernel_a_step_in_place(name):
    """What a slope is: nothing is left away, nothing done once for all, nothing copied."""
    shape, dtype = SHAPES["DeepSeek-V3 decode"], jnp.dtype(jnp.float8_e4m3fn)
    with traced_for("NVIDIA H200", 132, "cuda"):
        write_case, copy = in_place.write_case(shape, dtype), in_place.copy_case(in_place.write_bytes(shape, dtype))
        leaves, _, _ = in_place.write_shapes(shape, dtype)
    case, step = (copy, copy.step) if name == "copy" else (write_case, write_case.steps()["triton"])
    state = jax.eval_shape(case.state) if name == "copy" else leaves
    inputs = jax.eval_shape(lambda: case.inputs)
    facts = inspect(compile_for(in_place.program(step), (state, inputs), "h200"))
    assert facts.kernels == in_place.LONG
    assert facts.alias_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
