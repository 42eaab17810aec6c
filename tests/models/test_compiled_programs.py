"""The decode and extend programs, compiled at serving size for a CPU and for an H200: in place, and without copies.

What is checked is XLA's own account of the program: donated bytes that results reuse, temporary bytes, and every
operation that produces something as large as a layer's buffer.
"""

import pytest

from benchmarks import compiled as programs
from kvjax.compiled import h200_available

pytestmark = pytest.mark.compiled

CASES = [
    pytest.param(kind, model, platform, id=f"{kind}-{model}-{platform}")
    for platform in ("cpu", "h200")
    for model in programs.MODELS
    for kind in ("decode", "extend")
]


@pytest.mark.parametrize(("kind", "model", "platform"), CASES)
def test_pools_stay_in_place_at_every_size(kind, model, platform):
    if platform == "h200":
        available, why = h200_available()
        assert available, f"`make test` installs the deviceless compiler: {why}"
    small = programs.compiled(kind, model, platform)
    report = small.report
    assert report.alias_bytes >= small.pool.nbytes, "every pool buffer is updated where it lies"
    assert report.temp_bytes < small.smallest_leaf
    assert not (moved := report.large_ops(small.smallest_leaf)), "\n".join(map(str, moved))

    large = programs.compiled(kind, model, platform, 4 * programs.SLOTS)
    assert large.pool.nbytes > 3.9 * small.pool.nbytes
    assert large.report.temp_bytes - report.temp_bytes < 2**20, "temporaries do not grow with the pool"
    assert not large.report.large_ops(small.smallest_leaf)


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("model", programs.MODELS)
def test_kernels_of_a_decode_step_on_an_h200(model, implementation, record_property):
    """Recorded, with bounds that a forgotten fusion, a serial scatter or a read in XLA would break."""
    how = {} if implementation is None else {"implementation": implementation}  # spelled as above: compiled once
    report = programs.compiled("decode", model, "h200", **how).report
    step, kinds = max(report.loop_kernels.values()), programs.step_kernels(report)
    record_property("kernels_per_step", step)
    per_block = kinds.pop("attention_per_block")
    assert sum(kinds.values()) == step
    assert kinds["ledger"] > 0
    if implementation is None:
        assert kinds["write"] == programs.LAYERS, "one kernel writes"
        assert kinds["attention"] == 2 * programs.LAYERS, "one kernel reads, one merges what splits have read"
        assert per_block == 0
        assert step < 200
    else:
        assert per_block >= 4 * programs.LAYERS
        assert 100 < step < 320
