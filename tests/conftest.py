"""Settings of every test: the CPU backend, and the deviceless GPU compiler where it is installed."""

import os

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
