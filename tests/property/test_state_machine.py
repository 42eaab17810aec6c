"""kvjax and the plain-Python model of tests.property.model side by side, over random operations.

Volume: programs of 500 operations in one compiled scan (tests.property.programs); at least 100,000 operations in all,
every result, every list and the whole state compared after each of them. Depth: a hypothesis state machine over the
eager API, whose failures shrink.
"""
# pyright: reportArgumentType=false
# Operations take lists and NumPy arrays as well as jax.Array; tests use whichever reads best.

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvjax import Ledger, ReqToTokenPool, alloc_for_decode, alloc_for_extend, release_rows, set_committed
from kvjax.invariants import report
from tests.property import model
from tests.property.programs import LENGTH, AllocatorDriver, Config, Driver, LedgerDriver, RowsDriver

TOKEN = 0
ALLOCATORS = [
    Config(TOKEN, need_sort=False),
    Config(TOKEN, need_sort=True),
    Config(1, need_sort=True),
    Config(3, need_sort=False),
    Config(4, need_sort=True),
    Config(16, need_sort=False),
    Config(16, need_sort=True),
]
LEDGERS = [
    Config(TOKEN, need_sort=False),
    Config(TOKEN, need_sort=True),
    Config(1, need_sort=False),
    Config(3, need_sort=True),
    Config(4, need_sort=False),
    Config(16, need_sort=True),
]
PROGRAMS = {"allocator": 18, "ledger": 16, "rows": 10}  # per configuration
MANY = 4  # times as many with --heavy

pytestmark = pytest.mark.volume

REFUSABLE = {"alloc", "extend", "extend_counted", "extend_prefix", "decode"}
REFUSABLE |= {"alloc_rows", "set_committed", "tree_alloc"}


def test_the_volume_tests_compare_at_least_100_000_operations():
    programs = len(ALLOCATORS) * PROGRAMS["allocator"] + len(LEDGERS) * PROGRAMS["ledger"] + PROGRAMS["rows"]
    assert programs * LENGTH >= 100_000


@pytest.mark.parametrize("config", ALLOCATORS, ids=str)
def test_allocator_equals_model(config: Config, heavy: bool):
    driver = AllocatorDriver(config)
    _play(driver, PROGRAMS["allocator"], heavy)
    assert driver.model.faults > 20, "garbage was released, and counted"


@pytest.mark.parametrize("config", LEDGERS, ids=str)
def test_ledger_equals_model(config: Config, heavy: bool):
    driver = LedgerDriver(config)
    _play(driver, PROGRAMS["ledger"], heavy)
    assert driver.model.rows.faults > 0
    assert driver.model.allocator.faults > 0


def test_request_table_equals_model(heavy: bool):
    _play(RowsDriver(), PROGRAMS["rows"], heavy)


def _play(driver: Driver, programs: int, heavy: bool) -> None:
    programs *= MANY if heavy else 1
    run, operations, met = driver.compiled(), 0, set()
    for seed in range(programs):
        played, counts = driver.play(run, seed)
        operations += played
        met |= set(counts)
    assert operations == programs * LENGTH
    assert met == {(kind, True) for kind in driver.kernels} | {(k, False) for k in driver.kernels if k in REFUSABLE}
    assert run._cache_size() == 1  # type: ignore[attr-defined]


# --- the eager API, shrinkable -------------------------------------------------------------------------------------

LANES, ROWS, CONTEXT, CAPACITY, KNOWN = 3, 4, 14, 16, 8

INDEX = st.integers(0, ROWS - 1)
LENGTHS = st.integers(0, 9)
SLOTS = st.one_of(
    st.integers(0, 60), st.integers(-9, 9), st.sampled_from([2**31 - 1, -(2**31), 10**6])
)  # live, free, padding, garbage


class LedgerMachine(RuleBasedStateMachine):
    """A ledger and its model; pages outside all rows belong to a prefix tree (`self.tree`, runs of pages)."""

    def __init__(self, config: Config):
        super().__init__()
        self.ps = config.tokens
        self.ledger = Ledger.create(ReqToTokenPool.create(ROWS, CONTEXT), config.real())
        self.model = model.Ledger(model.Rows(ROWS, CONTEXT), config.modelled())
        self.tree: list[list[int]] = []
        self.structure = jax.tree.structure(self.ledger)

    # Rules -----------------------------------------------------------------------------------------------------

    @rule(lengths=st.lists(LENGTHS, min_size=1, max_size=LANES))
    def new_rows(self, lengths):
        self.extend([-1] * len(lengths), [0] * len(lengths), lengths)

    @rule(index=INDEX, tokens=LENGTHS)
    def later_chunk(self, index, tokens):
        row = self.live(index)
        allocated = self.model.lens[row][1]
        self.extend([row], [allocated if row else 0], [allocated + tokens if row else 0])

    @rule(index=INDEX, other=INDEX, keep=LENGTHS, tokens=LENGTHS)
    def resume_below_and_admit(self, index, other, keep, tokens):
        row = self.live(index)
        keep = min(keep, self.model.lens[row][1])
        self.extend([row, -1], [keep, 0], [keep + (tokens if row else 0), other])

    @rule(index=INDEX, known=st.integers(0, KNOWN), tokens=LENGTHS)
    def share_prefix_of_a_row(self, index, known, tokens):
        row = self.live(index)
        known = min(known, self.model.lens[row][0])
        self.extend([-1], [known], [known + tokens], [self.model.slots(row, 0, known)], [model.up(known, self.ps)])

    @rule(index=INDEX, known=st.integers(1, KNOWN), tokens=LENGTHS, own=st.integers(0, 2))
    def take_prefix_from_tree(self, index, known, tokens, own):
        if not self.tree:
            return
        run = self.tree[index % len(self.tree)]
        slots = [page * self.ps + k for page in run for k in range(self.ps)][:known]
        own = min(own * self.ps, model.up(len(slots), self.ps))
        if own < model.up(len(slots), self.ps) and len(slots) <= (len(run) - 1) * self.ps:
            return  # the run's tail would be nobody's
        self.extend([-1], [len(slots)], [len(slots) + tokens], [slots], [own], taken=(run, own // self.ps))

    @rule(
        rows=st.lists(st.integers(-2, ROWS + 1), min_size=LANES, max_size=LANES),
        prefix=st.lists(st.integers(-1, CONTEXT + 1), min_size=LANES, max_size=LANES),
        tokens=st.lists(st.integers(-2, CAPACITY), min_size=LANES, max_size=LANES),
    )
    def anything_goes(self, rows, prefix, tokens):
        self.extend(rows, prefix, [p + t for p, t in zip(prefix, tokens, strict=True)])

    @rule(rows=st.lists(st.integers(-1, ROWS + 1), min_size=LANES, max_size=LANES), mask=st.integers(0, 2**LANES - 1))
    def decode(self, rows, mask):
        self.step(rows, mask)

    @rule(mask=st.integers(1, 2**LANES - 1))
    def decode_live(self, mask):
        self.step((self.model.rows.live() + [0] * LANES)[:LANES], mask)

    @rule(rows=st.lists(st.integers(-1, ROWS + 1), max_size=LANES))
    def release(self, rows):
        trial = copy.deepcopy(self.model)
        trial.release(rows)
        if self.sound(trial, self.tree):
            self.model = trial
            self.ledger = release_rows(self.ledger, _fill(rows, LANES))

    @rule(index=INDEX, back=LENGTHS)
    def take_tokens_back(self, index, back):
        row = self.live(index)
        rows, lens = [row, 0], [self.model.lens[row][1] - back, 0]
        self.ledger, ok = set_committed(self.ledger, rows, lens)
        assert bool(ok) == self.model.set_committed(rows, lens)

    @rule(pages=st.integers(0, 3))
    def grow_tree(self, pages):
        allocator, loc, ok = self.ledger.allocator.alloc(pages * self.ps, capacity=CAPACITY)
        expected = self.model.allocator.alloc(pages * self.ps, CAPACITY)
        _same(loc, ok, expected)
        self.ledger = Ledger(self.ledger.table, allocator, self.ledger.lens)
        if expected:
            self.tree.append([slot // self.ps for slot in expected[:: self.ps]])

    @rule(index=INDEX, how=st.sampled_from(["tokens", "segment", "pages", "group"]), extra=st.lists(SLOTS, max_size=6))
    def shrink_tree(self, index, how, extra):
        """Release a run of the tree in one of the four ways, mixed with slots that may be anything."""
        run = self.tree[index % len(self.tree)] if self.tree else []
        slots = [page * self.ps + k for page in run for k in range(self.ps)]
        tree = [r for r in self.tree if r is not run]
        trial, wide = copy.deepcopy(self.model), 3 * self.ps
        allocator, held = trial.allocator, self.ledger.allocator
        extra_pages = [max(slot, -(2**31) + 1) for slot in extra]
        match how:
            case "tokens":
                mixed = slots[::-1] + extra
                held = held.free(_fill(mixed, wide + 6))
                allocator.release_tokens(mixed)
            case "segment":
                held = held.free_segment(_fill(slots, wide), self.ps)
                allocator.release_segment(slots)
            case "pages":
                held = held.free_page_ids(_fill(run + extra_pages, 9))
                allocator.release_pages(run + extra_pages)
            case _:
                held = held.free_group(_fill(extra, 6), ((_fill(slots, wide), 0),), _fill(extra_pages, 6))
                allocator.release_group(extra, [slots], extra_pages)
        if self.sound(trial, tree):
            self.model, self.tree = trial, tree
            self.ledger = Ledger(self.ledger.table, held, self.ledger.lens)

    @rule()
    def merge(self):
        self.model.allocator.merge()
        allocator = self.ledger.allocator.merge_and_sort_free()
        self.ledger = Ledger(self.ledger.table, allocator, self.ledger.lens)

    @rule(sure=st.integers(0, 5))
    def clear(self, sure):
        if sure == 5:
            self.model.clear()
            self.ledger, self.tree = self.ledger.clear(), []

    # After every step --------------------------------------------------------------------------------------------

    @invariant()
    def equal(self):
        m, ledger = self.model, jax.device_get(self.ledger)
        assert ledger.allocator.to_lists() == (m.allocator.free, m.allocator.staged)
        assert ledger.table.to_list() == m.rows.free
        assert ledger.table.generation.tolist() == m.rows.generation
        assert ledger.table.req_to_token.tolist() == m.rows.table.tolist()
        assert ledger.lens.tolist() == m.lens
        assert (int(ledger.table.faults), int(ledger.allocator.faults)) == (m.rows.faults, m.allocator.faults)
        assert jax.tree.structure(self.ledger) == self.structure

    @invariant()
    def conserved(self):
        assert self.sound(self.model, self.tree)

    @invariant()
    def no_complaint(self):
        assert report(self.ledger, _fill([page for run in self.tree for page in run], 32)) == ""

    # Helpers -----------------------------------------------------------------------------------------------------

    def live(self, index: int) -> int:
        """A live row; 0 where there is none."""
        rows = self.model.rows.live()
        return rows[index % len(rows)] if rows else 0

    def sound(self, m: model.Ledger, tree: list[list[int]]) -> bool:
        """Every page is free, staged, owned by one row or in the tree once; whatever a row borrows has an owner."""
        owned = [page for row in m.rows.live() for page in m.owned_pages(row)] + [p for run in tree for p in run]
        listed = sorted([*m.allocator.free, *m.allocator.staged, *owned])
        borrowed = {page for row in m.rows.live() for page in m.borrowed_pages(row)}
        return listed == list(range(1, m.allocator.num_pages + 1)) and borrowed <= set(owned)

    def extend(self, rows, prefix, seq, known=None, own=None, taken=None):
        """alloc_for_extend on both sides, unless it would take a page from somebody who still reads it."""
        more = LANES - len(rows)
        rows, prefix, seq = rows + [0] * more, prefix + [0] * more, seq + [0] * more
        real: dict[str, Any] = {}
        if known is not None:
            known = [slots + [0] * (KNOWN - len(slots)) for slots in known] + [[0] * KNOWN] * more
            own = [*(own or ())] + [0] * more
            real = {"prefix_loc": np.array(known, np.int32), "owned_from": own}
        trial, tree = copy.deepcopy(self.model), self.tree
        expected = trial.alloc_for_extend(rows, prefix, seq, CAPACITY, known, own)
        if expected is not None and taken is not None:
            tree = [r if r is not taken[0] else r[: taken[1]] for r in tree]
            tree = [r for r in tree if r]
        if not self.sound(trial, tree):
            return
        self.model, self.tree, before = trial, tree, self.ledger
        self.ledger, got, loc, ok = alloc_for_extend(self.ledger, rows, prefix, seq, capacity=CAPACITY, **real)
        _same(loc, ok, expected and expected[1])
        _same(got, ok, expected and expected[0])
        self.unchanged(before, bool(ok))

    def step(self, rows, mask):
        active, before = [bool(mask >> i & 1) for i in range(LANES)], self.ledger
        expected = self.model.alloc_for_decode(rows, active)
        self.ledger, loc, position, ok = alloc_for_decode(self.ledger, rows, np.array(active))
        _same(loc, ok, expected and expected[0])
        _same(position, ok, expected and expected[1])
        self.unchanged(before, bool(ok))

    def unchanged(self, before: Ledger, ok: bool) -> None:
        """A refused call leaves every bit as it was; a merge, which it may have made first, leaves nothing staged."""
        if not ok and before.allocator.to_lists() == self.ledger.allocator.to_lists():
            assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, self.ledger)))


def _fill(values: list[int], width: int) -> np.ndarray:
    return np.array(values + [0] * (width - len(values)), np.int32)


def _same(out: Any, ok: Any, expected: list[int] | None) -> None:
    assert bool(ok) == (expected is not None)
    wanted = expected or []
    assert np.asarray(out).tolist() == wanted + [0] * (len(out) - len(wanted))


@pytest.mark.parametrize("config", [Config(TOKEN, True), Config(3, False), Config(4, True)], ids=str)
def test_eager_ledger_equals_model(config: Config, heavy: bool):
    chosen = settings(
        max_examples=1000 if heavy else 25,
        stateful_step_count=30,
        deadline=None,
        derandomize=not heavy,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(LedgerMachine, config), settings=chosen)
