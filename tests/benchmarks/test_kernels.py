"""The benchmark of the kernels: what it would time gives one result, and without a GPU it says that it did nothing."""

import json

import jax
import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, Shape


@pytest.mark.parametrize("shape", [Shape(4, 2, 32, batch=2, context=64)], ids=["decode"])
def test_everything_that_is_timed_computes_the_same(shape):
    calls = kernels.implementations(shape, kernels.arrays(shape), interpret=True)
    assert {"xla", "pallas_triton", "jax.experimental"} <= calls.keys()
    results = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    assert np.abs(results["xla"]).max() > 0.1
    for name, result in results.items():
        np.testing.assert_allclose(result, results["xla"], rtol=0, atol=0.02, err_msg=name)


def test_bytes_are_those_of_the_rows():
    assert kernels.kv_bytes(SHAPES["Llama-3-8B decode"]) == 64 * 4096 * 2 * 8 * 128 * 2
    assert kernels.kv_bytes(SHAPES["DeepSeek-V3 decode"]) == 64 * 4096 * 576 * 2


def test_without_a_gpu_a_sentence_says_that_nothing_was_measured(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU here")  # it would measure, for minutes
    assert main(["kernels", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "No GPU was seen, JAX runs on 'cpu'" in err
