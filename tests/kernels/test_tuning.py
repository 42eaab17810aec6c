"""Tuned configs: a search keeps the fastest, a file counts on its own kind of device, a bad one is passed over."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from kvjax.compat import traced_for
from pallas_kernels import tuning
from pallas_kernels.kv_write.plan import Config, chosen_config, default_config, tuning_key

DEFAULT, FAST, SLOW, BROKEN = Config(1, 1024, 4), Config(2, 512, 8), Config(4, 64, 2), Config(64, 64, 1)
TIMES = {DEFAULT: 3e-6, FAST: 1e-6, SLOW: 9e-6}
H200 = "NVIDIA H200"


def seconds(config):
    if config == BROKEN:
        raise RuntimeError("out of shared memory")
    return TIMES[config]


def search(folder, key="a", kind=H200, candidates=(SLOW, BROKEN, FAST, DEFAULT)):
    return tuning.search("kv_write", key, candidates, seconds, folder=folder, kind=kind)


def test_the_fastest_candidate_is_kept_and_read_back(tmp_path, monkeypatch):
    best, times = search(tmp_path)
    assert (best, times) == (FAST, TIMES)
    search(tmp_path, key="b", candidates=[SLOW])
    assert tuning.chosen("kv_write", "a", DEFAULT) == DEFAULT  # no folder is named
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    assert tuning.chosen("kv_write", "a", DEFAULT) == DEFAULT  # this process runs on a CPU
    with traced_for(H200, 132, "cuda"):
        assert tuning.chosen("kv_write", "a", DEFAULT) == FAST
        assert tuning.chosen("kv_write", "b", DEFAULT) == SLOW
        assert tuning.chosen("kv_write", "c", DEFAULT) == DEFAULT
        assert tuning.chosen("attention", "a", DEFAULT) == DEFAULT
        search(tmp_path, key="b", candidates=[DEFAULT])  # a file that changes is read again
        assert tuning.chosen("kv_write", "b", FAST) == DEFAULT
    with traced_for("NVIDIA H100", 132, "cuda"):
        assert tuning.chosen("kv_write", "a", DEFAULT) == DEFAULT
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-h200.json"]


def test_a_kernel_asks_for_its_config(tmp_path, monkeypatch):
    leaf, row = jax.ShapeDtypeStruct((99, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    call = (leaf, leaf), ((row,), (row,)), jax.ShapeDtypeStruct((64,), jnp.int32)
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    with traced_for(H200, 132, "cuda"):
        assert chosen_config(*call) == default_config(*call) == Config(1, 1024, 4)
        search(tmp_path, key=tuning_key(*call))
        assert chosen_config(*call) == FAST


def test_no_candidate_that_works_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"no candidate config of kv_write \(a\) works here.*out of shared memory"):
        search(tmp_path, candidates=[BROKEN])
    assert list(tmp_path.iterdir()) == []


GOOD = {"format": 1, "device_kind": H200, "kernels": {"kv_write": {"a": dataclasses.asdict(FAST)}}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("\xff\xfe".encode("latin-1"), "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        (GOOD | {"kernels": {"kv_write": {"a": None}}}, "None is no Config"),
        (
            GOOD | {"kernels": {"kv_write": {"a": dataclasses.asdict(FAST) | {"columns": 2**40}}}},
            "columns is 1099511627776",
        ),
        ("[1, 2]", "is no tuning file of format 1 .format: 'list'"),
        (GOOD | {"format": 2}, "is no tuning file of format 1 .format: 2"),
        (GOOD | {"device_kind": "NVIDIA B200"}, "is for 'NVIDIA B200' and this device is 'NVIDIA H200'"),
        (GOOD | {"kernels": [3]}, "has no table of kernels"),
        (GOOD | {"kernels": {"kv_write": {"a": {"tokens": 1}}}}, "is no Config with the fields columns, num_warps"),
        (GOOD | {"kernels": {"kv_write": {"a": dataclasses.asdict(FAST) | {"tokens": 0}}}}, "tokens is 0"),
        (GOOD | {"kernels": {"kv_write": {"a": dataclasses.asdict(FAST) | {"tokens": "2"}}}}, "tokens is '2'"),
        (
            GOOD | {"kernels": {"kv_write": {"a": dataclasses.asdict(FAST) | {"tokens": 3}}}},
            "tokens is 3; a power of two",
        ),
        (GOOD | {"kernels": {"kv_write": {"a": [1, 2, 3]}}}, "is no Config"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_once_and_the_default_is_taken(tmp_path, monkeypatch, text, reason):
    path = tuning.path_for(H200, tmp_path)
    path.write_bytes(
        text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
    )
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    with traced_for(H200, 132, "cuda"), pytest.warns(UserWarning, match=reason):
        assert tuning.chosen("kv_write", "a", DEFAULT) == DEFAULT


def test_a_search_does_not_write_over_a_file_that_is_not_its_own(tmp_path):
    path = tuning.path_for(H200, tmp_path)
    path.write_text("notes of mine")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        search(tmp_path)
    assert path.read_text() == "notes of mine"
