"""`models.matmul.project`: right for every number of rows, and the form that streams the matrix is really compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.compiled import compile_for
from models.matmul import FEW_ROWS, project

OUT, IN = 48, 40


def operands(shape, dtype=np.float32):
    rng = np.random.default_rng(len(shape))
    return jnp.asarray(rng.normal(size=(*shape, IN)), dtype), jnp.asarray(rng.normal(size=(OUT, IN)), dtype)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (4,), (5,), (6, 1), (3, 3), (8,), (FEW_ROWS,), (FEW_ROWS + 1,)])
def test_rows_are_multiplied(shape):
    x, matrix = operands(shape)
    out = project(x, matrix, precision="highest")
    assert out.shape == (*shape, OUT)
    np.testing.assert_allclose(out, np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, matrix = operands((6,))
    alone = jnp.zeros_like(x).at[4].set(x[1])
    np.testing.assert_array_equal(project(alone, matrix)[4], project(x, matrix)[1])


def test_narrow_types_accumulate_as_asked():
    x, matrix = operands((6,), jnp.bfloat16)
    assert project(x, matrix).dtype == jnp.bfloat16
    assert project(x, matrix, preferred_element_type=jnp.float32).dtype == jnp.float32


@pytest.mark.compiled
def test_the_matrix_stands_on_the_left_for_few_rows():
    def dots(rows):
        shapes = (jax.ShapeDtypeStruct((rows, IN), jnp.float32), jax.ShapeDtypeStruct((OUT, IN), jnp.float32))
        text = compile_for(project, shapes, "cpu").as_text() or ""
        return [line.split(" dot(")[0].split("=")[-1].strip() for line in text.splitlines() if " dot(" in line]

    assert [d.split("{")[0] for d in dots(6)] == [f"f32[{OUT},8]"]
    assert [d.split("{")[0] for d in dots(128)] == [f"f32[128,{OUT}]"]
