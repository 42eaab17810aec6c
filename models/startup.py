"""What has to happen before JAX is imported by a command line: choose the CPU where there is no NVIDIA driver."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last under Windows' Linux


def has_nvidia_driver() -> bool:
    """A driver is loaded on this machine; nothing is said about whether the GPU works."""
    return any(Path(file).exists() for file in _DRIVER_FILES)


def import_jax() -> None:
    """Import JAX. Without a driver on the CPU, and silently, even when the CUDA plugin is installed.

    A JAX_PLATFORMS that asks for something else is left alone. No effect once JAX has been imported.
    """
    if "jax" in sys.modules:
        return
    if has_nvidia_driver() or os.environ.setdefault("JAX_PLATFORMS", "cpu") != "cpu":
        import jax

        return
    # The plugin's libraries write to the process's stderr that they found no driver, now and when JAX starts.
    with _stderr_closed():
        import jax

        jax.devices()


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Sends what C libraries write to file descriptor 2 nowhere. Python's own errors come as exceptions."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
