"""Settings of every test: the CPU backend, and the deviceless GPU compiler where it is installed."""

import gc
import os
from pathlib import Path

# Before JAX is imported: tests run on the CPU, and an installed CUDA plugin may compile without a driver.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest


def pytest_addoption(parser):
    parser.addoption("--heavy", action="store_true", help="run the longer sweeps too")


@pytest.fixture(scope="session")
def heavy(request) -> bool:
    """Whether the longer sweeps were asked for."""
    return request.config.getoption("--heavy")


def pytest_collection_modifyitems(config, items):
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
