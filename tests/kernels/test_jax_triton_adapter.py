"""The adapter to jax-triton: in place without a copy, refused with a reason, interpreted with the same arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compat import traced_for
from kvjax.compiled import compile_for, h200_available, inspect
from pallas_kernels import jax_triton_adapter
from tests.kernels import triton_interpreter
from tests.kernels.add_rows import _kernel, add_rows

ROWS, WIDTH, LANES = 1_000_003, 100, 7
BUFFER = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
LANE = jax.ShapeDtypeStruct((LANES,), jnp.int32)


def looped(buffer, rows):
    """Five calls on one buffer, and what the last one found."""

    def turn(carry):
        i, buffer, rows, _ = carry
        buffer, old = add_rows(buffer, rows)
        return i + 1, buffer, rows + 1, old

    start = (0, buffer, rows, jnp.zeros((LANES, WIDTH), jnp.float32))
    return jax.lax.while_loop(lambda carry: carry[0] < 5, turn, start)[1::2]


@pytest.mark.compiled
@pytest.mark.aot
@pytest.mark.parametrize("program", [add_rows, looped])
def test_a_buffer_is_updated_in_place_alone_and_in_a_loop(program):
    available, reason = h200_available()
    assert available, reason
    if jax.__version__ >= "0.12":  # the adapter refuses there, which has a test of its own below
        pytest.skip("jax-triton does not work with this JAX")
    facts = inspect(compile_for(program, (BUFFER, LANE), "h200", donate_argnums=0))
    nbytes = 4 * ROWS * WIDTH
    assert facts.alias_bytes == nbytes
    assert facts.temp_bytes < 8192
    assert facts.large_ops(nbytes // 100) == []
    if program is add_rows:
        assert facts.kernels == 1


def test_the_interpreter_runs_the_same_call():
    rng = np.random.default_rng(0)
    buffer, rows = rng.normal(size=(9, WIDTH)).astype(np.float32), np.array([3, 8, 0], np.int32)
    call = triton_interpreter.Call("tests.kernels.add_rows", "add_rows", (buffer, rows))
    outside = triton_interpreter.Call("tests.kernels.add_rows", "add_rows", (buffer, np.array([9], np.int32)))
    ((new, old),) = triton_interpreter.run([call])
    want = buffer.copy()
    want[rows] += 1
    np.testing.assert_array_equal(new, want)
    np.testing.assert_array_equal(old, buffer[rows])
    with pytest.raises(RuntimeError, match="wrote outside its buffers"):
        triton_interpreter.run([call, outside])


def test_newer_jax_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    with pytest.raises(ValueError, match=r"triton_call fails under jit with JAX 0\.12\.0\.1"):
        add_rows(jnp.zeros((3, WIDTH)), jnp.zeros(1, jnp.int32))


def test_a_platform_without_a_known_gpu_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="need an NVIDIA GPU, this process runs on 'cpu'"):
        jax_triton_adapter.compute_capability()
    with traced_for("NVIDIA Imaginary 1", 10, "cuda"), pytest.raises(ValueError, match=r"Imaginary.*CAPABILITIES"):
        jax_triton_adapter.compute_capability()
    with traced_for("NVIDIA H200", 132, "cuda"):
        assert jax_triton_adapter.compute_capability() == 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_place": (2,)}, "in_place names argument 2, but there are 2 arrays"),
        ({"in_place": ()}, "parameters buffer, rows, old, _, WIDTH, BLOCK"),
        ({"BLOCK": None}, "the constants WIDTH, BLOKC need one each"),
        ({"arrays": (jnp.zeros((3, 4)), 5)}, "argument 1 must be an array, got 5"),
    ],
)
def test_arguments_that_do_not_fit_the_kernel_are_refused(change, message):
    arguments = {"arrays": (jnp.zeros((3, 4)), jnp.zeros(1, jnp.int32)), "in_place": (0,), "WIDTH": 4, "BLOCK": 4}
    arguments["out_shapes"] = (jax.ShapeDtypeStruct((1, 4), jnp.float32),)
    arguments.update(change)
    if arguments["BLOCK"] is None:
        arguments["BLOKC"] = arguments.pop("BLOCK") or 4
    with pytest.raises(ValueError, match=message):
        jax_triton_adapter.call(_kernel, arguments.pop("arrays"), grid=(1,), **arguments)
