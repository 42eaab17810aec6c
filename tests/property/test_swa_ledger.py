"""Random requests over a ledger with a window: growing, stopping, resumed, taken back and finished, in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import (
    Ledger,
    PureSWATokenToKVPoolAllocator,
    ReqToTokenPool,
    SWARingTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    check_invariants,
    release_rows,
    release_window,
    set_committed,
    window_loc,
)

WINDOW, ROWS, LANES, CHUNK, CONTEXT = 6, 5, 3, 8, 48
OPS = 700


def make(kind, ps):
    table = ReqToTokenPool.create(ROWS, CONTEXT)
    allocator = {
        "dual": lambda: SWATokenToKVPoolAllocator.create(96, 40, ps, need_sort=True),
        "pure": lambda: PureSWATokenToKVPoolAllocator.create(40, ps),
        "ring": lambda: SWARingTokenToKVPoolAllocator.create(96, ps, ROWS, WINDOW, CHUNK),
    }[kind]()
    return Ledger.create(table, allocator, WINDOW)


@jax.jit
def observe(ledger):
    """Everything that is checked after a step, in one fetch: flags, lengths, window slots of every token, counts."""
    rows, positions = jnp.arange(ROWS + 1)[:, None], jnp.arange(CONTEXT)[None]
    free = [ledger.allocator.full_available_size(), ledger.allocator.available_size()]
    loc = window_loc(ledger, rows, positions)
    return check_invariants(ledger).any(), ledger.lens, loc, jnp.stack(free), ledger.faults


@pytest.mark.parametrize("kind", ["dual", "pure", "ring"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_window_layers_hold_exactly_what_a_window_may_need(kind, page_size):
    rng, ps = np.random.default_rng(11 * page_size + len(kind)), page_size
    ledger = make(kind, ps)
    extend = jax.jit(lambda s, rows, p, q: alloc_for_extend(s, rows, p, q, capacity=LANES * CHUNK))
    decode, release, commit = jax.jit(alloc_for_decode), jax.jit(release_rows), jax.jit(set_committed)
    window = jax.jit(lambda s, rows: release_window(s, rows, max_tokens=CHUNK))
    size = {}  # committed tokens of each live row
    outcomes = set()
    for _ in range(OPS):
        rows = np.zeros(LANES, np.int32)
        picked = rng.permutation(sorted(size))[:LANES].astype(np.int32)
        rows[: len(picked)] = picked
        name = rng.choice(["extend", "decode", "release", "back"], p=[0.3, 0.5, 0.12, 0.08])
        ok = True
        if name == "extend":
            rows[len(picked) :][: ROWS - len(size)] = -1
            prefix = np.array([size.get(r, 0) for r in rows], np.int32)
            seq = np.where(rows == 0, 0, np.minimum(prefix + rng.integers(0, CHUNK + 1, LANES), CONTEXT)).astype(
                np.int32
            )
            ledger, rows, _, ok = extend(ledger, rows, prefix, seq)
            if ok:
                size |= {int(r): int(n) for r, n in zip(rows, seq, strict=True) if r}
                ledger = window(ledger, rows)
        elif name == "decode":
            rows = np.where([size.get(r, 0) < CONTEXT for r in rows], rows, 0).astype(np.int32)
            ledger, _, _, ok = decode(ledger, rows)
            if ok:
                size |= {int(r): size[int(r)] + 1 for r in rows if r}
        elif name == "release":
            rows[1:] = 0
            ledger = release(ledger, rows)
            size.pop(int(rows[0]), None)
        else:  # one token is taken back; refused where that reaches a released page
            rows[1:] = 0
            shorter = np.array([max(0, size.get(r, 0) - 1) for r in rows], np.int32)
            ledger, ok = commit(ledger, rows, shorter)
            if ok and rows[0]:
                size[int(rows[0])] = int(shorter[0])
        outcomes.add((str(name), bool(ok)))

        broken, lens, loc, (full, both), faults = jax.device_get(observe(ledger))
        assert not broken
        assert faults == 0
        assert {r: int(lens[r, 0]) for r in size} == size
        pages = {"full": 0, "window": 0}
        for row, n in size.items():
            allocated, begin = int(lens[row, 1]), int(lens[row, 3])
            there = loc[row] > 0
            assert there[max(0, n - WINDOW + 1) : n].all(), "what the next token's window reaches"
            if kind == "ring":
                assert begin >= allocated - ledger.allocator.ring
                assert there.tolist() == [begin <= p < allocated for p in range(CONTEXT)]
                continue
            assert there.tolist() == [begin <= p < allocated for p in range(CONTEXT)]
            pages["full"] += -(-allocated // ps)
            pages["window"] += -(-allocated // ps) - begin // ps
            assert (-(-allocated // ps) - begin // ps) * ps <= WINDOW + 2 * ps
        slots = loc[loc > 0]
        assert len(set(slots.tolist())) == len(slots), "no two tokens share a window slot"
        if kind == "pure":
            assert both == 40 - pages["window"] * ps
        if kind == "dual":
            assert full == 96 - pages["full"] * ps
            assert both == min(full, 40 - pages["window"] * ps)
    assert {("decode", True), ("extend", True), ("release", True)} <= outcomes
    assert kind == "pure" or ("extend", False) in outcomes, "memory ran short; where all layers slide it never does"
