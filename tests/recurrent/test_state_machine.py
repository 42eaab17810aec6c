"""Random admissions, donations, checkpoints, releases and failures against a plain-Python model.

After every operation: rows, free slots, both slot tables, counters and flags, and the content of every slot. Free slots
are poisoned with NaN all the time, so whatever leaks shows.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import HybridReqToTokenPool, Ledger, PagedTokenToKVPoolAllocator, release_rows
from kvjax.invariants import check_invariants, report
from kvjax.recurrent import (
    MambaPool,
    NGramPool,
    checkpoint,
    extend_with_state,
    free_slots,
    take_slots,
    take_state,
)

ROWS, SLOTS, PAGES, PAGE, CONTEXT, LANES, EOS = 5, 13, 14, 4, 16, 3, 9
VARIANTS = {  # extra_buffer, overlap, lazy: (entries, slots taken at first)
    "plain": ((False, True, False), 0, 0),
    "nonoverlap": ((True, False, False), 1, 1),
    "overlap": ((True, True, False), 2, 2),
    "lazy": ((True, True, True), 2, 1),
}
OPERATIONS = 2_500  # per variant: 10,000 in all
MANY = 4  # times as many with --heavy
CHECKED = 250  # operations between two looks at the invariants' own flags

pytestmark = pytest.mark.volume


class Model:
    """Lists and dicts. `content[slot]` is the number that the slot holds, None for poison."""

    def __init__(self, width: int, initial: int):
        self.width, self.initial = width, initial
        self.free_rows, self.free = list(range(1, ROWS + 1)), list(range(1, SLOTS + 1))
        self.rows: dict[int, dict] = {}  # live rows: working, tracking, next, last, tokens, holds
        self.tree: list[int] = []  # slots of no row
        self.content: list[float | None] = [0.0] + [None] * SLOTS
        self.pages, self.faults = PAGES, 0

    def live(self, slot: int) -> bool:
        return 1 <= slot <= SLOTS and slot not in self.free

    def give(self, slots) -> None:
        self.free.extend(slots)
        for slot in slots:
            self.content[slot] = None

    def take(self, lanes, copies, tokens=None) -> list[int] | None:
        """lanes: bool per lane; a row and its slots for each, or nothing."""
        count = sum(lanes)
        pages = 0 if tokens is None else sum(-(-t // PAGE) for t, w in zip(tokens, lanes, strict=True) if w)
        bad = any(w and c and not self.live(c) for w, c in zip(lanes, copies, strict=True))
        if bad or count > len(self.free_rows) or count * (1 + self.initial) > len(self.free) or pages > self.pages:
            return None
        cut = len(self.free_rows) - count
        new, self.free_rows = iter(self.free_rows[cut:]), self.free_rows[:cut]
        before, out = list(self.content), []
        for i, wanted in enumerate(lanes):
            if not wanted:
                out.append(0)
                continue
            row, slots = next(new), [self.free.pop(0) for _ in range(1 + self.initial)]
            tracking = slots[1:] + [-1] * (self.width - self.initial)
            tokens_of = 0 if tokens is None else tokens[i]
            self.rows[row] = {
                "working": slots[0], "tracking": tracking, "next": 0, "last": max(0, self.initial - 1),
                "tokens": tokens_of, "holds": True,
            }  # fmt: skip
            self.pages -= -(-tokens_of // PAGE)
            self.content[slots[0]] = before[copies[i]] if copies[i] else 0.0
            for slot in slots[1:]:
                self.content[slot] = 0.0
            out.append(row)
        return out

    def checkpoint(self, rows, when) -> list[int]:
        out = []
        for row, wanted in zip(rows, when, strict=True):
            held = self.rows.get(row)
            if held is None or not held["holds"] or not wanted or not self.width:
                out.append(0)
                continue
            at = held["next"]
            other = (at + 1) % self.width
            if held["tracking"][at] <= 0:
                at, other = other, at
            slot = max(held["tracking"][at], 0)
            if slot:
                held["last"], held["next"] = at, other if held["tracking"][other] > 0 else at
                self.content[slot] = self.content[held["working"]]
            out.append(slot)
        return out

    def slots_of(self, row: int, keep: int = -1) -> list[int]:
        held = self.rows[row]
        tracked = [s for i, s in enumerate(held["tracking"]) if s > 0 and i != keep]
        return [held["working"], *tracked] if held["holds"] else []

    def release(self, rows) -> None:
        going = list(dict.fromkeys(row for row in rows if row in self.rows))
        for row in going:
            self.give(self.slots_of(row))
            self.pages += -(-self.rows[row]["tokens"] // PAGE)
            del self.rows[row]
            self.free_rows.append(row)
        self.faults += len({row for i, row in enumerate(rows) if row and (row not in going or row in rows[:i])})


def _programs():
    """The operations, compiled once each with a donated state."""

    def program(function):
        traced = []

        def counted(ledger, states, *args):
            traced.append(None)
            return function(ledger, states, *args)

        return jax.jit(counted, donate_argnums=(0, 1)), traced

    def donate(ledger, states, row, index, new):
        table, given, ok = ledger.table.donate(row, index, new)
        return dataclasses.replace(ledger, table=table), states, given, ok

    def set_track(ledger, states, row, index, slot):
        table, _, ok = ledger.table.set_track(row, index, slot)
        return dataclasses.replace(ledger, table=table), states, ok

    def free_mamba(ledger, states, row, keep):
        return dataclasses.replace(ledger, table=ledger.table.free_mamba(row, keep)), states

    def extend(ledger, states, rows, prefix, seq, copy):
        return extend_with_state(ledger, states, rows, prefix, seq, capacity=LANES * CONTEXT, copy_from=copy)

    def step(ledger, states, rows, value):
        slots = ledger.table.working_slots(rows)
        old = states.read(2, slots)[1]
        new = jnp.where(jnp.ones_like(old, bool), value[:, None], old)
        tokens = jnp.broadcast_to(value[:, None].astype(jnp.int32), (LANES, 2))
        context = states.siblings[0].set_context(slots, tokens)
        states = states.write(2, slots, [jnp.broadcast_to(value[:, None, None], (LANES, 1, 2))], new)
        return ledger, states.with_members([states, context])

    def poison(ledger, states):
        slot = jnp.arange(SLOTS + 1, dtype=jnp.int32)
        free = (slot > 0) & ~ledger.table.slots.is_live(slot)
        spoil = [jnp.full((SLOTS + 1, 1, 2), jnp.nan)], jnp.full((SLOTS + 1, 1), jnp.nan)
        at = jnp.where(free, slot, 0)
        context = states.siblings[0].set_context(at, jnp.full((SLOTS + 1, 2), -7, jnp.int32))
        return ledger, states.write(2, at, *spoil).with_members([states.write(2, at, *spoil), context])

    functions = {
        "take": take_state, "extend": extend, "checkpoint": checkpoint, "donate": donate, "set_track": set_track,
        "free_mamba": free_mamba, "step": step, "poison": poison,
        "release": lambda ledger, states, rows: (release_rows(ledger, rows), states),
        "take_slots": lambda ledger, states, need, copy: take_slots(ledger, states, need, copy, capacity=2),
        "free_slots": lambda ledger, states, slots: (free_slots(ledger, slots), states),
    }  # fmt: skip
    return {name: program(function) for name, function in functions.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_books_and_every_state_equal_the_model(variant, heavy):
    switches, width, initial = VARIANTS[variant]
    allocator = PagedTokenToKVPoolAllocator.create(PAGES * PAGE, PAGE)
    ledger = Ledger.create(HybridReqToTokenPool.create(ROWS, CONTEXT, SLOTS, *switches), allocator)
    states = MambaPool.create(SLOTS, [2], [(1, 2)], (1,), conv_dtype=jnp.float32)
    states = states.register_slot_state(NGramPool.create(SLOTS, 2, EOS))
    model, programs, rng = Model(width, initial), _programs(), np.random.default_rng(len(variant))
    flags = jax.jit(check_invariants)
    counts: dict[tuple[str, bool], int] = {}

    def call(name, *args):
        nonlocal ledger, states
        ledger, states = (out := programs[name][0](ledger, states, *args))[:2]
        return out[2:]

    def i32(values, length=LANES, fill=0):
        return np.asarray([*values, *[fill] * (length - len(values))], np.int32)

    def some_slot():  # mostly one that is handed out
        held = [slot for slot in range(1, SLOTS + 1) if model.live(slot)]
        return int(rng.choice(held)) if held and rng.random() < 0.8 else int(rng.integers(-1, SLOTS + 3))

    for number in range(OPERATIONS * (MANY if heavy else 1)):
        call("poison")
        kinds = ["take", "take", "extend", "extend", "checkpoint", "step", "step", "release", "release"]
        kinds += ["donate", "set_track", "free_mamba", "free_slots"]
        kind, ok = str(rng.choice(kinds)), True
        live = list(model.rows)
        if kind in ("take", "extend"):
            want = rng.random(LANES) < 0.5
            copies = [some_slot() if rng.random() < 0.3 else 0 for _ in range(LANES)]
            tokens = rng.integers(1, CONTEXT + 1, LANES).tolist() if kind == "extend" else None
            expected = model.take(want, copies, tokens)
            ok = expected is not None
            if tokens is None:
                rows, slots, got = call("take", want, i32(copies))
            else:
                zero, seq = np.zeros(LANES, np.int32), np.where(want, tokens, 0).astype(np.int32)
                rows, slots, _, got = call("extend", np.where(want, -1, 0).astype(np.int32), zero, seq, i32(copies))
            assert bool(got) == ok
            assert rows.tolist() == (expected or [0] * LANES)
            assert slots.tolist() == [model.rows[r]["working"] if r else 0 for r in rows.tolist()]
        elif kind == "step":
            rows = i32(rng.permutation(np.asarray([*live, 0, 0, ROWS + 4]))[:LANES].tolist())
            value = float(number + 1)
            for row in rows.tolist():
                if row in model.rows and model.rows[row]["holds"]:
                    model.content[model.rows[row]["working"]] = value
            call("step", rows, np.full(LANES, value, np.float32))
        elif kind == "checkpoint":
            rows, when = i32(rng.permutation(np.asarray([*live, 0, 0]))[:LANES].tolist()), rng.random(LANES) < 0.7
            expected = model.checkpoint(rows.tolist(), when)
            assert call("checkpoint", rows, when)[0].tolist() == expected
        elif kind == "release":
            rows = [int(rng.choice(live)) if live and rng.random() < 0.5 else 0 for _ in range(LANES)]
            rows = [int(rng.integers(-1, ROWS + 3)) if rng.random() < 0.05 else row for row in rows]
            model.release(rows)
            call("release", i32(rows))
        elif kind == "free_mamba":
            row, keep = int(rng.choice([*live, 0])), int(rng.integers(-1, 2))
            if row and model.rows[row]["holds"]:
                held = model.rows[row]
                if 0 <= keep < width and held["tracking"][keep] > 0:
                    model.tree.append(held["tracking"][keep])
                model.give(model.slots_of(row, keep))
                held["holds"] = False
            elif row:
                model.faults += 1
            call("free_mamba", i32([row], 1), i32([keep], 1))
        elif kind in ("donate", "set_track"):
            row, index = int(rng.choice([*live, 0])), int(rng.integers(-1, width + 1))
            copies = [some_slot() if rng.random() < 0.5 else 0, 0]
            need = int(rng.integers(0, 3))
            legal = need <= len(model.free) and not (need and copies[0] and not model.live(copies[0]))
            slots, got = call("take_slots", np.int32(need), i32(copies, 2))
            assert bool(got) == legal
            if legal:
                taken, before = [model.free.pop(0) for _ in range(need)], list(model.content)
                for slot, source in zip(taken, copies, strict=False):
                    model.content[slot] = before[source] if source else 0.0
                model.tree.extend(taken)
                assert slots.tolist() == taken + [0] * (2 - need)
            held = model.rows.get(row)
            new = model.tree[-1] if model.tree and rng.random() < 0.8 else -1
            fits = held is not None and held["holds"] and 0 <= index < width and (new == -1 or model.live(new))
            if kind == "donate":
                ok = row == 0 or (fits and new > 0 and held["tracking"][index] > 0)
                given, got = call("donate", i32([row], 1), i32([index], 1), i32([new], 1))
                assert given.tolist() == [held["tracking"][index] if ok and row else 0]
            else:
                ok = row == 0 or fits
                (got,) = call("set_track", i32([row], 1), i32([index], 1), i32([new], 1))
            assert bool(got) == ok
            if ok and row:
                if new > 0:
                    model.tree.remove(new)
                    held["last"] = index
                if held["tracking"][index] > 0:
                    model.tree.append(held["tracking"][index])
                held["tracking"][index] = new
        else:
            going = model.tree[: int(rng.integers(0, 3))]
            model.tree = model.tree[len(going) :]
            model.give(going)
            stray = [SLOTS + 2] if rng.random() < 0.05 else []
            model.faults += len(stray)
            call("free_slots", i32([*going, *stray]))
        counts[kind, ok] = counts.get((kind, ok), 0) + 1
        _compare(ledger, states, model, f"operation {number}, {kind}")
        if number % CHECKED == 0:
            tree = i32(model.tree, SLOTS)
            assert not flags(ledger, None, tree).any(), report(ledger, None, tree)

    refusable = {"take", "extend", "set_track", "donate"}
    assert {kind for kind, ok in counts if not ok} == refusable, counts
    assert min(counts.values()) > 10, counts
    assert all(len(traced) == 1 for _, traced in programs.values()), "one compile each"


def _compare(ledger, states, model, where):
    ledger, states = jax.device_get((ledger, states))
    table = ledger.table
    assert table.table.to_list() == model.free_rows, where
    assert table.slots.to_lists() == (model.free, []), where
    assert (int(table.faults), int(ledger.allocator.available_size())) == (model.faults, model.pages * PAGE), where
    for row, held in model.rows.items():
        assert (table.cursor[row, 0] != 0) == held["holds"], where
        if held["holds"]:
            assert table.working[row] == held["working"], where
            assert table.cursor[row, 1:].tolist() == [held["next"], held["last"]], where
            assert table.tracking is None or table.tracking[row].tolist() == held["tracking"], where
    conv, temporal, context = states.conv[0][0], states.temporal[0], states.siblings[0].context
    for slot, value in enumerate(model.content):
        if value is None:
            continue  # free: the poison comes with the next operation
        assert (conv[slot] == value).all(), (where, slot)
        assert (temporal[slot] == value).all(), (where, slot)
        assert slot == 0 or (context[slot] == (value or EOS)).all(), (where, slot)
