"""The lookup of trace files: nothing that was named may silently drop out."""

import gzip
import json
import os

import numpy as np
import pytest

from tests.golden import kv_write, traces


@pytest.fixture
def two_directories(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, text in ((first, "1"), (second, "2")):
        directory.mkdir()
        (directory / "a_1.jsonl").write_text(f'{{"ops": {text}}}\n{{"op": "x"}}\n')
    (second / "a_2.jsonl.gz").write_bytes(gzip.compress(b'{"ops": 3}\n'))
    (second / "b.json").write_text("{}")
    (second / "notes.md").write_text("")
    monkeypatch.setenv("KVJAX_GOLDEN", os.pathsep.join([str(first), str(second)]))
    return first, second


def test_a_trace_is_found_once_by_name_in_the_first_directory_that_has_it(two_directories):
    first, second = two_directories
    assert traces.find("a_*") == [first / "a_1.jsonl", second / "a_2.jsonl.gz"]
    assert traces.find(["b", "a_2"]) == [second / "a_2.jsonl.gz", second / "b.json"]
    assert traces.find("c_*") == []


def test_plain_and_gzipped_files_read_alike(two_directories):
    first, second = two_directories
    assert traces.load_jsonl(first / "a_1.jsonl") == ({"ops": 1}, [{"op": "x"}])
    assert traces.load_jsonl(second / "a_2.jsonl.gz") == ({"ops": 3}, [])
    assert traces.load_json(second / "b.json") == {}
    assert traces.arrays_of(second / "a_2.jsonl.gz") == second / "a_2.npz"


@pytest.mark.parametrize("content", [None, "readme"])
def test_a_named_directory_without_traces_is_an_error(tmp_path, monkeypatch, content):
    directory = tmp_path / "empty"
    if content:
        directory.mkdir()
        (directory / "README.md").write_text(content)
    monkeypatch.setenv("KVJAX_GOLDEN", str(directory))
    with pytest.raises(ValueError, match=r"empty, which holds no trace"):
        traces.find("*")


def test_traces_are_committed_with_the_tests(monkeypatch):
    monkeypatch.delenv("KVJAX_GOLDEN", raising=False)
    committed = traces.ROOT / "tests" / "data" / "golden"
    assert committed in traces.trace_dirs()
    kinds = {traces.load_json(path)["kind"] for path in traces.find("kv_write_*") if path.parent == committed}
    assert {"mha", "mla", "k_only"} <= kinds


# A replay that looks away is worse than none: each change to a recorded file must make it fail.


def broken(tmp_path, change):
    mha = [p for p in traces.find("kv_write_*") if traces.load_json(p)["kind"] == "mha"]
    source = min(mha, key=lambda p: traces.arrays_of(p).stat().st_size)
    doc = traces.load_json(source)
    with np.load(traces.arrays_of(source)) as archive:
        arrays = dict(archive)
    change(doc, arrays)
    target = tmp_path / "kv_write_broken.json"
    target.write_text(json.dumps(doc))
    np.savez(traces.arrays_of(target), **arrays)
    return target


def _flip_last_byte_of_the_last_slot(doc, arrays):
    arrays[doc["ops"][-1]["after"]["v"][-1]["npz"]].reshape(-1).view(np.uint8)[-1] ^= 1


CHANGES = {
    "a byte": _flip_last_byte_of_the_last_slot,
    "a config key": lambda doc, arrays: doc["config"].update(layout="HND"),
    "the rows": lambda doc, arrays: doc["config"].update(rows=doc["config"]["rows"] + 1),
    "the bytes": lambda doc, arrays: doc["config"].update(kv_size_bytes=[1, 2]),
    "a kind": lambda doc, arrays: doc.update(kind="mxa"),
    "a top key": lambda doc, arrays: doc.update(extra=1),
    "an operation": lambda doc, arrays: doc["ops"][0].update(op="set_kv_buffers"),
    "an argument": lambda doc, arrays: doc["ops"][0]["args"].update(dcp_kv_mask=[1]),
    "a missing after": lambda doc, arrays: doc["ops"][-1].pop("after"),
    "an unknown buffer": lambda doc, arrays: doc["ops"][-1]["after"].update(scale=[]),
    "an operation's key": lambda doc, arrays: doc["ops"][-1].update(result=1),
    "an unused array": lambda doc, arrays: arrays.update(spare=np.zeros(3)),
    "no operations": lambda doc, arrays: doc.update(ops=[]),
}


def test_the_write_replay_accepts_what_was_recorded(tmp_path):
    kv_write.Replay(broken(tmp_path, lambda doc, arrays: None)).run()


@pytest.mark.parametrize("change", CHANGES)
def test_the_write_replay_notices(tmp_path, change):
    with pytest.raises((AssertionError, KeyError)):
        kv_write.Replay(broken(tmp_path, CHANGES[change])).run()
