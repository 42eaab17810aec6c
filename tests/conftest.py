"""Settings of every test: the CPU backend, the deviceless GPU compiler where it is installed, how programs compile.

Most tests ask what a program computes, and compile far longer than they run. `--quick-compile` (`make test`) has XLA
spare its optimisation for them. Tests marked `compiled` ask what XLA made of a program, so they run without it, and a
test that looks at a program all the same fails. Without the option every test compiles as users do.
"""

import gc
import os
from pathlib import Path

# Before JAX is imported: tests run on the CPU, and an installed CUDA plugin may compile without a driver.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest

from tests.quick import FLAGS


def pytest_addoption(parser):
    parser.addoption("--heavy", action="store_true", help="run the longer sweeps too")
    parser.addoption(
        "--quick-compile", action="store_true", help="compile without optimisation, and leave out the tests of programs"
    )


def pytest_configure(config):
    if config.getoption("--quick-compile"):
        # XLA reads it once, when JAX makes its backend; workers inherit it.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags if FLAGS in flags else f"{flags} {FLAGS}".strip()


@pytest.fixture(scope="session")
def heavy(request) -> bool:
    """Whether the longer sweeps were asked for."""
    return request.config.getoption("--heavy")


# Last, for the folders' own conftest files add marks.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick-compile"):
        looking = [item for item in items if "compiled" in item.keywords]
        config.hook.pytest_deselected(items=looking)
        items[:] = [item for item in items if "compiled" not in item.keywords]
    if config.getoption("--heavy"):
        return
    longer = pytest.mark.skip(reason="a longer sweep: pass --heavy (make heavy) to run it")
    for item in items:
        if "heavy" in item.keywords:
            item.add_marker(longer)


# Every program that XLA's CPU backend compiles maps some memory, and Linux allows a process 65,530 maps. A worker that
# has gone through hundreds of tests comes near that, and then a compilation ends in a segmentation fault.
MAPS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _programs_are_as_users_have_them(request, monkeypatch):
    """With --quick-compile nobody looks at a program."""
    if not request.config.getoption("--quick-compile"):
        return
    import jax

    def refuse(*_args, **_kwargs):
        raise AssertionError("this test looks at a program that was compiled without optimisation: mark it `compiled`")

    for look in ("as_text", "cost_analysis", "memory_analysis"):
        monkeypatch.setattr(jax.stages.Compiled, look, refuse)
