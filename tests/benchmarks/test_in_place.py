"""What is timed in place: every implementation does the same, on a state that goes through call after call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import in_place, kernels
from benchmarks.in_place import LONG
from benchmarks.shapes import BOOKS, SHAPES, WRITES, Shape
from pallas_kernels import registry

SMALL = {"context": 32, "chunk": 4, "page": 4}


def by_each(case, calls, names=("xla", "pallas_triton")):
    """{implementation: (state, outputs of the last call)} after some calls of a program that takes one step."""
    results, steps = {}, case.steps(interpret=True)
    for name in names:
        step = steps[name]
        run, state = in_place.program(step), case.state()
        for x in case.inputs[:calls]:
            before, (state, out) = state, run(state, [x])
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "taken over"
        results[name] = state, out[0]
    return results


def test_a_timed_write_stores_the_same_rows_by_every_implementation():
    shape = Shape(4, 2, 16, batch=2, context=64)
    results = by_each(in_place.write_case(shape, jnp.dtype(jnp.float8_e4m3fn)), 3)
    for leaves, _ in results.values():
        for leaf, plain in zip(leaves, results["xla"][0], strict=True):
            assert (leaf == plain).all()
            assert 2 <= (plain != 0).any(axis=(1, 2)).sum() <= 3 * shape.batch


@pytest.mark.parametrize("operation", BOOKS)
def test_timed_books_move_the_tokens_that_they_are_to_move(operation):
    """By XLA, and one of them by a kernel: tests/kernels compares those, and interpreting them is slow."""
    case = in_place.ledger_case(operation, 2, **SMALL)
    names = ("xla", "pallas_triton") if operation == "ledger_decode" else ("xla",)
    start, results = case.state(), by_each(case, 2, names)
    for books, out in results.values():
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), books, results["xla"][0]))
        if operation != "release":
            assert out[-1], "a step that is refused is no measure"
    tokens = {"ledger_decode": 4, "ledger_extend": 16, "release": -16}[operation]
    assert int((results["xla"][0].lens - start.lens)[:, 0].sum()) == tokens


@pytest.mark.parametrize("title", ["Llama-3-8B write, fp8", "DeepSeek-V3 write"])
def test_every_step_writes_other_slots_with_other_values(title):
    name, dtype = WRITES[title]
    case = in_place.write_case(SHAPES[name], jnp.dtype(dtype))
    leaves, values, loc = in_place.write_shapes(SHAPES[name], jnp.dtype(dtype))
    assert len(case.inputs) == LONG
    for slots, made in case.inputs:
        assert jax.eval_shape(lambda x: x, (made, slots)) == (values, loc)
        assert len(np.unique(slots)) == loc.shape[0]
        assert SHAPES[name].page <= int(slots.min()) <= int(slots.max()) < leaves[0].shape[0]
    assert (case.inputs[0][0] != case.inputs[1][0]).any()


def test_bytes_of_a_write():
    assert in_place.write_bytes(SHAPES["Llama-3-8B decode"]) == 64 * 2 * 1024 * (2 + 2)
    assert in_place.write_bytes(SHAPES["DeepSeek-V3 decode"], jnp.float8_e4m3fn) == 64 * 576 * (2 + 1)


def test_the_whole_benchmark_runs_and_passes_over_what_does_not_work(monkeypatch, capsys):
    """On the CPU, with "xla" and an implementation that is refused; the figures mean nothing here."""
    monkeypatch.setattr(kernels, "no_gpu", lambda what: False)
    monkeypatch.setattr(registry, "available", lambda operation: ("xla", "mosaic"))
    monkeypatch.setattr(kernels, "jax_paged_attention", lambda *_: broken)
    monkeypatch.setattr(kernels, "SHAPES", {"attention": Shape(4, 2, 16, batch=2, context=64)})
    monkeypatch.setattr(kernels, "WRITES", {"write": ("attention", "bfloat16")})
    monkeypatch.setattr(kernels, "BATCHES", (2,))
    monkeypatch.setattr(in_place, "SHORT", 1)
    monkeypatch.setattr(in_place, "LONG", 2)
    monkeypatch.setattr(in_place, "ledger_case", functools.partial(in_place.ledger_case, **SMALL))
    told = []
    found = {m.name: m for m in kernels.run(told.append, quick=True)}
    assert told == ["attention", "write", "ledger_decode, batch 2"]
    for title in ("attention", "write"):
        assert {f"kernels/{title}/{what}" for what in ("copy", "xla", "xla/bandwidth", "xla/share")} <= found.keys()
    assert "kernels/ledger_decode, batch 2/xla" in found
    assert all(m.value > 0 for m in found.values())
    assert not any("mosaic" in name or "jax.experimental" in name for name in found)
    err = capsys.readouterr().err
    assert "attention: jax.experimental is left out: no such kernel" in err
    for title in ("attention: mosaic", "write: mosaic 1", "write: mosaic 2", "ledger_decode, batch 2: mosaic 2"):
        assert f"{title} is left out: " in err


def broken():
    raise ValueError("no such kernel")
