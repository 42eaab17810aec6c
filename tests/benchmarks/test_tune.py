"""The search of configs, with a clock that is made up: what is searched, what is written, and who reads it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import in_place, kernels, tune
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, Shape
from kvjax.compat import traced_for
from pallas_kernels import jax_triton_adapter, tuning
from pallas_kernels.attention import options, plan
from pallas_kernels.attention.plan import Config
from pallas_kernels.kv_write import plan as write_plan

H200 = "NVIDIA H200"
# The kernel that is searched, and another one.
BEST, OTHER = ("triton", "pallas_triton") if jax_triton_adapter.why_not() is None else ("pallas_triton", "triton")
ATTENTION = plan.tuned_as(BEST)


@pytest.fixture(scope="module")
def wanted():
    with traced_for(H200, 132, "cuda"):
        return tune.searches()


def asked_by_the_kernel(shape: Shape, by: str = BEST) -> Config:
    """The config that a call of this shape gets while it is traced."""
    given = jax.eval_shape(lambda: kernels.arrays(shape))
    _, _, how = kernels.call_of(shape, given)
    extras = {"v": given.get("v"), "positions": given["positions"] if shape.new > 1 else None}
    _, static = options.prepare(given["q"], given["k"], given["table"], given["rows"], given["lens"], **extras, **how)
    q = jax.ShapeDtypeStruct((shape.batch, shape.new, shape.heads, shape.dim), jnp.bfloat16)
    return plan.make_plan(q, given["k"], given["table"], extras, static, by).config


def made_up(one):
    """A search whose fastest candidate is the last, and whose second one can not run."""

    def timer():
        def seconds(config):
            if config == one.candidates[1]:
                raise RuntimeError("out of shared memory")
            return 1e-6 * (len(one.candidates) - one.candidates.index(config))

        return seconds

    return dataclasses.replace(one, timer=timer)


def test_every_shape_is_searched_each_key_once(wanted):
    keys = [(one.operation, one.key) for one in wanted]
    assert len(set(keys)) == len(keys)
    assert {one.title for one in wanted if one.operation == ATTENTION} == set(SHAPES)
    with traced_for(H200, 132, "cuda"):
        writes = {
            ("kv_write", write_plan.tuning_key(*in_place.write_shapes(shape, dtype)))
            for shape in SHAPES.values()
            for dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
        }
    assert writes == {key for key in keys if key[0] == "kv_write"}


def test_candidates_are_the_default_first_and_valid_ones_within_bounds(wanted):
    for one in wanted:
        assert 10 < len(set(one.candidates)) == len(one.candidates) <= 48
        default = one.candidates[0]
        for config in one.candidates[1:]:
            sizes = dataclasses.asdict(config)
            assert tuning.config_from(sizes, type(config)) == config
            free = {"num_stages"} | {name for name, n in dataclasses.asdict(default).items() if n == sizes[name]}
            assert all(n & (n - 1) == 0 for name, n in sizes.items() if name not in free), config
        varied = [f.name for f in dataclasses.fields(default) if len({getattr(c, f.name) for c in one.candidates}) > 1]
        assert len(varied) >= 3, "a search that looks along one axis is none"


def test_candidates_of_a_call_do_not_exceed_what_it_holds():
    """Few rows, few keys, a window: no tile of more rows, no split without keys."""
    for shape, window in ((Shape(4, 4, 64, batch=2, context=64), None), (Shape(8, 2, 64, batch=1), 256)):
        given = jax.eval_shape(lambda shape=shape: kernels.arrays(shape))
        arrays = (given["q"], given["k"], given["table"], given["rows"], given["lens"])
        _, static = options.prepare(*arrays, v=given["v"], scale=1.0, window=window)
        q = jax.ShapeDtypeStruct((shape.batch, 1, *given["q"].shape[1:]), jnp.bfloat16)
        call = (q, given["k"], given["table"], {"v": given["v"]}, static)
        found = plan.candidates(*call)
        assert found[0] == plan.default_for(*call) == plan.make_plan(*call, BEST).config
        assert {config.block_m for config in found} == {16}
        assert {config.splits for config in found} == {1}


def test_what_was_found_is_what_the_kernels_ask_for(tmp_path, monkeypatch, wanted):
    measured = list(tune.tune([made_up(one) for one in wanted], tmp_path, H200))
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-h200.json"]
    assert len(measured) == 3 * len(wanted)
    assert {m.value for m in measured if m.name.endswith("/failed")} == {1}
    best = {(one.operation, one.key): one.candidates[-1] for one in wanted}
    with traced_for(H200, 132, "cuda"):
        for one in wanted:
            if one.operation == ATTENTION:
                assert asked_by_the_kernel(SHAPES[one.title]) == one.candidates[0]
        monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
        for one in wanted:
            if one.operation == ATTENTION:
                assert asked_by_the_kernel(SHAPES[one.title]) == one.candidates[-1] != one.candidates[0]
                other = asked_by_the_kernel(SHAPES[one.title], OTHER)
                assert other == one.candidates[0], "what was found for one kernel is not taken by another"
        for shape in SHAPES.values():
            for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
                call = in_place.write_shapes(shape, dtype)
                assert write_plan.chosen_config(*call) == best["kv_write", write_plan.tuning_key(*call)]


def test_a_search_without_a_candidate_that_works_is_told_and_the_others_go_on(tmp_path, capsys, wanted):
    def broken():
        raise RuntimeError("no memory for the arrays")

    first, second = wanted[:2]
    measured = list(tune.tune([dataclasses.replace(first, timer=broken), made_up(second)], tmp_path, H200))
    assert {m.config["key"] for m in measured} == {second.key}
    assert f"{first.title}: no candidate config" in capsys.readouterr().err
    kept = tuning.read(tuning.path_for(H200, tmp_path), H200)
    assert kept == {ATTENTION: {second.key: dataclasses.asdict(second.candidates[-1])}}


def test_without_a_gpu_a_sentence_says_that_nothing_was_searched(tmp_path, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU here")  # it would search, for an hour
    assert main(["tune", "--json", "--tuning", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "No GPU was seen, JAX runs on 'cpu'; configs are searched on an NVIDIA GPU only" in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_for_tune_alone(capsys):
    with pytest.raises(SystemExit):
        main(["kernels", "--tuning", "somewhere"])
    assert "--tuning is for tune, not for kernels" in capsys.readouterr().err
