"""Random operations on the SWA allocators against a plain model: conservation on both sides, exact mapping and faults.

The model keeps, for every full slot, its partner, and nothing about order (the recorded traces decide that). It says
in advance whether a call must succeed and how many faults it counts; what an allocation returned is checked and taken
over.
"""

import functools

import jax
import numpy as np
import pytest

from kvjax import SWATokenToKVPoolAllocator

LANES, CAPACITY, WIDTH = 3, 24, 32  # fixed shapes: lanes of a call, new tokens, slots of a release
CASES = [(1, 20, 11, False), (1, 24, 24, True), (2, 24, 14, False), (4, 48, 20, True), (4, 40, 28, False)]
OPS, MANY = 700, 4_200  # per case; many with --heavy: 21,000 in all


class Operations:
    """Every operation jitted once."""

    def __init__(self):
        # Compiling takes longer than running: as little of it as can be.
        jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        self.alloc = jit(lambda a, n: a.alloc(n, capacity=CAPACITY))
        self.extend = jit(lambda a, p, s, last: a.alloc_extend(p, s, last, capacity=CAPACITY))
        self.tail = jit(lambda a, p, s, last, n: a.alloc_extend_swa_tail(p, s, last, n, capacity=CAPACITY))
        self.decode = jit(lambda a, s, last, on: a.alloc_decode(s, last, on))
        self.group = jit(lambda a, *args: a.free_group(*args))
        self.free = {
            name: jit(lambda a, loc, name=name: getattr(a, name)(loc)) for name in ("free", "free_swa", "free_full")
        }


class Driver:
    def __init__(self, page_size, size, size_swa, need_sort, seed):
        self.ps, self.size, self.rng = page_size, size, np.random.default_rng(seed)
        self.pages, self.swa_pages = size // page_size, size_swa // page_size
        self.op = Operations()
        self.state = SWATokenToKVPoolAllocator.create(size, size_swa, page_size, need_sort)
        self.mapping = np.zeros(size + page_size + 1, np.int64)
        self.mapping[-1] = -1
        self.used: set[int] = set()  # full pages that are handed out
        self.rows: list[list[int]] = []  # requests: full slots in order
        self.faults = 0
        self.done: dict[str, int] = {}

    # --- the model -------------------------------------------------------------------------------------------------

    def tokens(self, page):
        return range(page * self.ps, (page + 1) * self.ps)

    def paired(self, page):
        return [s for s in self.tokens(page) if self.mapping[s] > 0]

    def swa_used(self):
        return {int(p) // self.ps for p in self.mapping[:-1] if p > 0}

    def room(self):
        return self.pages - len(self.used), self.swa_pages - len(self.swa_used())

    def unmap(self, page):
        for slot in self.tokens(page):
            self.mapping[slot] = 0

    def drop(self, page):
        """The full page is free: no request may name its slots any more."""
        self.unmap(page)
        self.used.discard(page)
        self.rows = [r for r in ([s for s in row if s // self.ps != page] for row in self.rows) if r]

    def partner_continues(self, prefix, last):
        partner = int(self.mapping[last]) if last >= 0 else 0
        return prefix % self.ps == 0 or (partner > 0 and partner % self.ps == last % self.ps)

    def check(self):
        got = jax.device_get(self.state)
        assert got.mapping[-1] == -1
        np.testing.assert_array_equal(got.mapping, self.mapping)
        for side, used, count in (
            (got.full_attn_allocator, self.used, self.pages),
            (got.swa_attn_allocator, self.swa_used(), self.swa_pages),
        ):
            listed = sorted([*side.to_lists()[0], *side.to_lists()[1]])
            assert listed == sorted(set(range(1, count + 1)) - used), "free and used pages must make up the pool"
            assert int(side.available_size()) == len(listed) * self.ps
        assert got.pairs.held[1:].tolist() == [len(self.paired(p)) for p in range(1, self.pages + 1)]
        users = np.bincount(self.mapping[:-1][self.mapping[:-1] > 0] // self.ps, minlength=self.swa_pages + 1)
        assert got.pairs.users.tolist() == users.tolist()
        assert int(got.faults) == self.faults

    def took(self, loc, lanes, swa_tail=None):
        """Take over the slots of a successful call. lanes: (row, prefix, new); swa_tail: how many have a partner."""
        mapping = np.asarray(self.state.mapping)
        slots, at, fresh = np.asarray(loc).tolist(), 0, self.swa_used()
        assert not any(slots[sum(n for _, _, n in lanes) :])
        for row, prefix, new in lanes:
            for i, slot in enumerate(slots[at : at + new]):
                assert slot % self.ps == (prefix + i) % self.ps
                page, first = slot // self.ps, slot % self.ps == 0
                assert 1 <= page <= self.pages
                assert (page in self.used) != first, "offset 0 opens a page, other offsets go on in one"
                self.used.add(page)
                row.append(slot)
                partner = int(mapping[slot])
                if swa_tail is not None and i < new - swa_tail:
                    assert partner == 0
                elif self.mapping[slot] == 0:
                    assert partner > 0
                    assert partner not in self.mapping, "no two tokens share a window slot"
                    assert swa_tail is not None or partner % self.ps == slot % self.ps
                    assert (partner // self.ps not in fresh) or (swa_tail is None and not first)
                self.mapping[slot] = partner
            at += new
        self.rows += [row for row, prefix, _ in lanes if prefix == 0]

    # --- one random operation --------------------------------------------------------------------------------------

    def step(self):
        name = self.rng.choice(
            ["extend", "decode", "tail", "alloc", "free", "free_swa", "free_full", "group", "garbage"],
            p=[0.22, 0.2, 0.12, 0.02, 0.12, 0.12, 0.08, 0.1, 0.02],
        )
        self.done[name] = self.done.get(name, 0) + 1
        getattr(self, name)()

    def pick(self, count):
        order = self.rng.permutation(len(self.rows))[:count]
        return [self.rows[i] for i in order]

    def lengths(self, lanes, budget=CAPACITY):
        new = self.rng.multinomial(int(self.rng.integers(0, budget + 1)), np.ones(lanes) / lanes)
        return [int(n) for n in new]

    def extend(self):
        held = self.pick(int(self.rng.integers(0, LANES + 1)))
        rows = [*held, *([] for _ in range(LANES - len(held)))]
        lanes = [(row, len(row), n) for row, n in zip(rows, self.lengths(LANES), strict=True)]
        lanes = [(r, p, n) for r, p, n in lanes if not (p and r[-1] % self.ps != (p - 1) % self.ps)]
        lanes += [([], 0, 0)] * (LANES - len(lanes))
        last = [r[-1] if r else -1 for r, _, _ in lanes]
        opened = sum(-(-(p + n) // self.ps) + -p // self.ps for _, p, n in lanes if n)
        legal = all(n == 0 or self.partner_continues(p, x) for (_, p, n), x in zip(lanes, last, strict=True))
        args = (np.array(x, np.int32) for x in ([p for _, p, _ in lanes], [p + n for _, p, n in lanes], last))
        self.state, loc, ok = self.op.extend(self.state, *args)
        assert bool(ok) == (legal and opened <= min(self.room()))
        if ok:
            self.took(loc, [(r, p, n) for r, p, n in lanes if n])
        else:
            assert not np.any(loc)

    def decode(self):
        rows = [r for r in self.pick(LANES) if r[-1] % self.ps == (len(r) - 1) % self.ps]
        lanes = [(r, len(r), 1) for r in rows]
        pad = LANES - len(lanes)
        seq = np.array([p + 1 for _, p, _ in lanes] + [0] * pad, np.int32)
        last = np.array([r[-1] for r, _, _ in lanes] + [-1] * pad, np.int32)
        opened = sum(p % self.ps == 0 for _, p, _ in lanes)
        legal = all(self.partner_continues(p, r[-1]) for r, p, _ in lanes)
        self.state, loc, ok = self.op.decode(self.state, seq, last, np.arange(LANES) < len(lanes))
        assert bool(ok) == (legal and opened <= min(self.room()))
        if ok:
            self.took(loc, lanes)
        else:
            assert not np.any(loc)

    def tail(self):
        row = self.pick(1)[0] if self.rows and self.rng.random() < 0.3 else []
        if row and row[-1] % self.ps != (len(row) - 1) % self.ps:
            return
        prefix, new = len(row), int(self.rng.integers(0, CAPACITY + 1))
        tail = int(self.rng.integers(0, new + 2))  # one too many is refused
        last = row[-1] if row else -1
        opened = (-(-(prefix + new) // self.ps) + -prefix // self.ps) if new else 0
        full, swa = self.room()
        args = (np.array([x], np.int32) for x in (prefix, prefix + new, last))
        self.state, loc, ok = self.op.tail(self.state, *args, np.int32(tail))
        assert bool(ok) == (tail <= new and opened <= full and -(-tail // self.ps) <= swa)
        if ok and new:
            self.took(loc, [(row, prefix, new)], tail)

    def alloc(self):
        need = int(self.rng.integers(0, CAPACITY + 2))
        self.state, loc, ok = self.op.alloc(self.state, np.int32(need))
        fits = need <= CAPACITY and need // self.ps <= min(self.room())
        assert bool(ok) == (need % self.ps == 0 and fits)
        if ok and need:
            self.took(loc, [([], 0, need)])

    def some_slots(self):
        """Tokens of one or two requests, or of requests that are gone; none twice (a fault at page size 1 only)."""
        slots = [s for row in self.pick(2) for s in row]
        if self.rng.random() < 0.1:
            slots += self.rng.integers(1, self.size + 1, 2).tolist()
        self.rng.shuffle(slots)
        return list(dict.fromkeys(slots))[: int(self.rng.integers(0, WIDTH + 1))]

    def padded(self, slots):
        return np.array(slots + [0] * (WIDTH - len(slots)), np.int32)

    def release(self, name, slots):
        pages = {s // self.ps for s in slots if s}
        for page in pages:
            if page not in self.used:
                self.faults += name != "free_swa"
            elif name == "free_swa":
                self.unmap(page)
            elif name == "free":
                self.drop(page)
            elif self.paired(page):
                self.faults += 1
            else:
                self.drop(page)

    def free(self, name="free"):
        slots = self.some_slots()
        self.state = self.op.free[name](self.state, self.padded(slots))
        self.release(name, slots)

    def free_swa(self):
        self.free("free_swa")

    def free_full(self):
        self.free("free_full")

    def garbage(self):
        """Negative ids and ids past the pool: refused by everything, counted on the full side."""
        slots = [-1, -7, self.size + self.ps, self.size + 3 * self.ps]
        name = str(self.rng.choice(["free", "free_full"]))
        self.state = self.op.free[name](self.state, self.padded(slots))
        self.faults += len({s // self.ps for s in slots})

    def group(self):
        """Items of any kind in call order; a page is in one item that touches the full side at most."""
        items, taken, left = [], set(), WIDTH
        for row in self.pick(3):
            pages = sorted({s // self.ps for s in row} - taken)
            taken |= set(pages)
            slots = [s for s in row if s // self.ps in pages][:left]
            left -= len(slots)
            for name in self.rng.choice(["free", "free_swa", "free_full", "swa then full", "full then swa"], 1):
                if " then " in name:
                    half = slots[: len(slots) // 2]
                    first, second = name.split(" then ")
                    items += [(f"free_{first}", half), (f"free_{second}", half)]
                else:
                    items.append((str(name), slots))
        items = [(name, slots) for name, slots in items if slots]
        loc = [s for _, slots in items for s in slots]
        kinds = [name for name, slots in items for _ in slots]
        of_segment = [b for _, slots in items for b in [self.rng.random() < 0.5] * len(slots)]
        swa, full = (
            np.array([k in ok for k in kinds] + [False] * (WIDTH - len(loc)))
            for ok in (("free", "free_swa"), ("free", "free_full"))
        )
        of_segment = np.array(of_segment + [False] * (WIDTH - len(loc)), bool)
        self.state = self.op.group(self.state, self.padded(loc), swa, full, of_segment)
        for name, slots in items:
            self.release(name, slots)


@pytest.mark.volume
@pytest.mark.parametrize(("page_size", "size", "size_swa", "need_sort"), CASES)
def test_both_sides_stay_whole_under_random_operations(page_size, size, size_swa, need_sort, heavy):
    driver, ops = Driver(page_size, size, size_swa, need_sort, seed=7 * page_size + size), MANY if heavy else OPS
    for number in range(ops):
        driver.step()
        if number % 4 == 0 or number > ops - 50:
            driver.check()
    assert len(driver.done) == 9, "every operation took part"
    assert min(driver.done.values()) > ops // 140
    assert driver.faults > 0
