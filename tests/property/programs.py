"""Random programs of pool operations: written by the model, run by kvjax in one compiled scan, compared step by step.

A driver asks the model what is live and invents the next operation: a sensible one, a wrong one or garbage. The model
carries it out at once and its answer and whole state are written down. kvjax then runs the encoded list: one
`lax.scan` over `lax.switch`, one compilation per driver, and every state on the way comes back for comparison.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax import (
    Ledger,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    alloc_for_decode,
    alloc_for_extend,
    check_invariants,
    release_rows,
    set_committed,
)
from tests.property import model

LENGTH = 500  # operations per program

Args = dict[str, Any]
Kernel = Callable[[Any, Args], tuple[Any, Any, jax.Array]]  # (state, ok, result)


@dataclass
class Step:
    """One operation as the model carried it out."""

    kind: str
    args: Args
    ok: bool
    out: list[int]
    after: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """An allocator to test; page_size 0 is the token allocator."""

    page_size: int
    need_sort: bool

    def __str__(self) -> str:
        kind = f"page{self.page_size}" if self.page_size else "token"
        return f"{kind}-{'sorted' if self.need_sort else 'unsorted'}"

    @property
    def tokens(self) -> int:
        return max(self.page_size, 1)

    @property
    def size(self) -> int:
        """13 pages (odd token counts leave an unusable tail)."""
        return 13 * self.tokens + self.tokens // 2

    def modelled(self) -> model.TokenAllocator | model.PagedAllocator:
        if self.page_size == 0:
            return model.TokenAllocator(self.size, self.need_sort)
        return model.PagedAllocator(self.size, self.page_size, self.need_sort)

    def real(self) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
        if self.page_size == 0:
            return TokenToKVPoolAllocator.create(self.size, self.need_sort)
        return PagedTokenToKVPoolAllocator.create(self.size, self.page_size, self.need_sort)


class Driver:
    """What the drivers share: encoding, running, comparing."""

    kernels: dict[str, Kernel]
    fields: dict[str, np.ndarray]  # name -> the value of a field that an operation does not use

    def start(self) -> Any:
        """The initial kvjax state."""
        raise NotImplementedError

    def reset(self, seed: int) -> None:
        """A fresh model and a fresh source of randomness."""
        raise NotImplementedError

    def invent(self) -> Step:
        """The next operation, carried out by the model."""
        raise NotImplementedError

    def observe(self, state: Any) -> dict[str, Any]:
        """Everything that the model knows, read from a kvjax state with numpy leaves."""
        raise NotImplementedError

    def conserved(self) -> None:
        """Assert that the model's ids are free, staged or live, each exactly once."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Longest result of an operation."""
        raise NotImplementedError

    def compiled(self) -> Callable[[Any, Args], tuple[Any, Any]]:
        names = list(self.kernels)

        def pad(out: jax.Array) -> jax.Array:
            return jnp.pad(out, (0, self.width - out.shape[0]))

        def branch(name: str):
            def run(state: Any, x: Args):
                state, ok, out = self.kernels[name](state, x)
                return state, (state, jnp.asarray(ok), pad(out), self.flags(state, x))

            return run

        branches = [branch(name) for name in names]
        return jax.jit(lambda s, xs: lax.scan(lambda c, x: lax.switch(x["kind"], branches, c, x), s, xs))

    def flags(self, state: Any, x: Args) -> jax.Array:
        """bool[]: a rule of check_invariants is broken."""
        return jnp.zeros((), bool)

    def encode(self, steps: Sequence[Step]) -> Args:
        names = list(self.kernels)
        out = {"kind": np.array([names.index(step.kind) for step in steps], np.int32)}
        for name, default in self.fields.items():
            column = np.broadcast_to(default, (len(steps), *default.shape)).copy()
            for i, step in enumerate(steps):
                if name in step.args:
                    value = np.asarray(step.args[name], np.int64).astype(default.dtype)
                    if value.ndim == 0:
                        column[i] = value
                    else:
                        assert value.shape[0] <= column.shape[1], f"{name} {value.shape} in {step.kind}"
                        column[(i, *map(slice, value.shape))] = value
            out[name] = column
        return out

    def play(self, run: Callable, seed: int) -> tuple[int, dict[tuple[str, bool], int]]:
        """One program; AssertionError with the operation where kvjax and the model part. Returns (operations, how
        often each (kind, ok) occurred)."""
        self.reset(seed)
        steps = []
        for _ in range(LENGTH):
            steps.append(self.invent())
            self.conserved()
        start = self.start()
        last, (states, oks, outs, flags) = jax.device_get(run(start, self.encode(steps)))
        leaves, structure = jax.tree.flatten(states)
        assert structure == jax.tree.structure(start) == jax.tree.structure(last), "static fields changed"
        before = jax.device_get(start)
        seen = self.observe(before)
        counts: dict[tuple[str, bool], int] = {}
        for i, step in enumerate(steps):
            after = jax.tree.unflatten(structure, [leaf[i] for leaf in leaves])
            where = f"seed {seed}, operation {i}: {step.kind} {step.args}\nbefore: {seen}\n"
            assert bool(oks[i]) == step.ok, f"{where}ok is {oks[i]}"
            expected = step.out + [0] * (self.width - len(step.out))
            assert outs[i].tolist() == expected, f"{where}returned {outs[i].tolist()}, the model {expected}"
            previous, seen = seen, self.observe(after)
            assert seen == step.after, f"{where}after: {seen}\nmodel: {step.after}"
            if not step.ok and previous == seen:
                same = jax.tree.map(np.array_equal, before, after)
                assert all(jax.tree.leaves(same)), f"{where}refused, but the state's bits changed: {same}"
            assert not flags[i], f"{where}check_invariants complains after it"
            key = (step.kind, step.ok)
            counts[key], before = counts.get(key, 0) + 1, after
        return len(steps), counts


def _listed(allocator: Any) -> dict[str, Any]:
    free, staged = allocator.to_lists()
    counts = {"faults": int(allocator.faults), "available": int(allocator.available_size())}
    return {"free": free, "staged": staged} | counts


def _modelled(allocator: model.Allocator) -> dict[str, Any]:
    return {
        "free": allocator.free.copy(),
        "staged": allocator.staged.copy(),
        "faults": allocator.faults,
        "available": allocator.available(),
    }


def _partition(allocator: model.Allocator, held: Sequence[int]) -> None:
    """Free, staged and held pages are all pages, each once."""
    everything = sorted([*allocator.free, *allocator.staged, *held])
    assert everything == list(range(1, allocator.num_pages + 1)), "pages lost or in two places"


def _i32(*shape: int, fill: int = 0) -> np.ndarray:
    return np.full(shape, fill, np.int32)


class AllocatorDriver(Driver):
    """An allocator alone, as callers without a request table use it."""

    LANES = 4

    def __init__(self, config: Config):
        self.config, ps = config, config.tokens
        self.capacity = 4 * ps + 8
        self.loc_width = {1: 24, 3: 74, 4: 72, 16: 96}[ps]  # long enough for the short cut that whole pages take
        b = self.LANES
        self.fields = {
            "need": _i32(),
            "prefix": _i32(b),
            "seq": _i32(b),
            "last": _i32(b, fill=-1),
            "active": np.zeros(b, bool),
            "num_lanes": _i32(fill=-1),  # -1: None
            "tokens": _i32(self.loc_width),
            "segment": _i32(self.loc_width),
            "pages": _i32(8),
        }
        capacity, zeros = self.capacity, jnp.zeros(0, jnp.int32)

        def alloc(a, x):
            a, loc, ok = a.alloc(x["need"], capacity=capacity)
            return a, ok, loc

        def extend(a, x):
            a, loc, ok = a.alloc_extend(x["prefix"], x["seq"], x["last"], capacity=capacity)
            return a, ok, loc

        def extend_counted(a, x):
            a, loc, ok = a.alloc_extend(x["prefix"], x["seq"], x["last"], capacity=capacity, num_lanes=x["num_lanes"])
            return a, ok, loc

        def decode(a, x):
            a, loc, ok = a.alloc_decode(x["seq"], x["last"], x["active"])
            return a, ok, loc

        self.kernels = {
            "alloc": alloc,
            "extend": extend,
            "extend_counted": extend_counted,
            "decode": decode,
            "free": lambda a, x: (a.free(x["tokens"]), True, zeros),
            "free_segment": lambda a, x: (a.free_segment(x["segment"], 0), True, zeros),
            "free_page_ids": lambda a, x: (a.free_page_ids(x["pages"]), True, zeros),
            "free_group": lambda a, x: (
                a.free_group(x["tokens"], ((x["segment"], 0),), x["pages"]),
                True,
                zeros,
            ),
            "merge": lambda a, x: (a.merge_and_sort_free(), True, zeros),
            "clear": lambda a, x: (a.clear(), True, zeros),
        }

    @property
    def width(self) -> int:
        return self.capacity

    def start(self):
        return self.config.real()

    def reset(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = self.config.modelled()
        self.sequences: list[list[int]] = []  # slots of live requests; each owns its pages

    def observe(self, state) -> dict[str, Any]:
        return _listed(state)

    def conserved(self) -> None:
        _partition(self.model, sorted(self.model.live()))

    # --- inventing -----------------------------------------------------------------------------------------------

    def invent(self) -> Step:
        rng, m, ps = self.rng, self.model, self.config.tokens
        kind = rng.choices(
            list(self.kernels), weights=[4, 8, 2, 12, 7, 5, 5, 5, 1 if self.config.need_sort else 0.1, 0.3]
        )[0]
        args: Args = {}
        out: list[int] | None = []
        match kind:
            case "alloc":
                need = rng.choice([0, ps, ps, 2 * ps, rng.randint(0, self.capacity + 2), -ps, 2**31 - 1, -(2**31)])
                args = {"need": need}
                out = m.alloc(need, self.capacity)
            case "extend" | "extend_counted":
                args, chosen = self._extend()
                counted = kind == "extend_counted"
                if counted:
                    args["num_lanes"] = rng.choice([0, 4, 4, 4, 7, 2**31 - 1, -(2**31)])
                known = args["num_lanes"] if counted else None
                out = m.alloc_extend(args["prefix"], args["seq"], args["last"], self.capacity, known)
                if out is not None:
                    at = 0
                    for slots, p, s in zip(chosen, args["prefix"], args["seq"], strict=True):
                        if slots is not None:
                            slots.extend(out[at : at + s - p])
                            if p == 0 and s:
                                self.sequences.append(slots)
                        at += s - p
            case "decode":
                args, chosen = self._decode()
                out = m.alloc_decode(args["seq"], args["last"], args["active"])
                if out is not None:
                    for slots, slot in zip(chosen, out, strict=True):
                        if slots is not None:
                            slots.append(slot)
            case "free":
                args = {"tokens": self._tokens()}
                m.release_tokens(args["tokens"])
            case "free_segment":
                args = {"segment": self._segment()}
                m.release_segment(args["segment"])
            case "free_page_ids":
                args = {"pages": self._pages()}
                m.release_pages(args["pages"])
            case "free_group":
                args = {"tokens": self._tokens(), "segment": self._segment(), "pages": self._pages()}
                m.release_group(args["tokens"], [args["segment"]], args["pages"])
            case "merge":
                m.merge()
            case "clear":
                m.clear()
        live = m.live()
        self.sequences = [s for s in self.sequences if all(slot // ps in live for slot in s)]
        return Step(kind, args, out is not None, out or [], _modelled(m))

    def _garbage(self) -> int:
        ps, n = self.config.tokens, self.model.num_pages
        behind = [(n + 1) * ps, (n + 1) * ps + 1, self.config.size + ps, 10**9, 2**31 - 1]
        return self.rng.choice([-1, -ps, -ps - 1, -(2**31), *behind, 1, ps - 1])

    def _extend(self) -> tuple[Args, list[list[int] | None]]:
        rng, ps = self.rng, self.config.tokens
        held = rng.sample(self.sequences, min(len(self.sequences), self.LANES))
        prefix, seq, last, chosen = [], [], [], []
        left = self.capacity if rng.random() < 0.9 else self.capacity + ps
        for _ in range(self.LANES):
            what = rng.random()
            slots = held.pop() if held and what < 0.4 else []
            p = len(slots)
            new = min(rng.choice([1, ps - 1, ps, ps + 1, rng.randint(0, 2 * ps + 2)]), left) if what < 0.85 else 0
            left -= new
            prefix.append(p)
            seq.append(p + new)
            last.append(slots[-1] if slots else -1)
            chosen.append(slots if new else None)
        if rng.random() < 0.12:  # wrong use of one lane
            i = rng.randrange(self.LANES)
            match rng.randrange(4):
                case 0:
                    seq[i] = prefix[i] - 1
                case 1:
                    prefix[i], seq[i] = -1, rng.choice([-1, 0, 3])
                case 2:
                    seq[i] = rng.choice([2**31 - 1, prefix[i] + self.capacity + 1])
                case _:  # where the prefix is aligned, last_loc plays no part
                    last[i] = self._garbage() if rng.random() < 0.6 else last[i] + 1
        return {"prefix": prefix, "seq": seq, "last": last}, chosen

    def _decode(self) -> tuple[Args, list[list[int] | None]]:
        rng = self.rng
        held = rng.sample(self.sequences, min(len(self.sequences), self.LANES))
        seq, last, active, chosen = [], [], [], []
        for _ in range(self.LANES):
            slots = held.pop() if held and rng.random() < 0.85 else None
            if slots is not None:
                seq.append(len(slots) + 1)
                last.append(slots[-1])
                active.append(True)
            else:  # not in use, or listed with length 0; what stands in an unused lane is not read
                on = rng.random() < 0.3
                seq.append(0 if on else rng.choice([0, -5, 7, 2**31 - 1]))
                last.append(self._garbage())
                active.append(on)
            chosen.append(slots)
        if rng.random() < 0.1:
            i = rng.randrange(self.LANES)
            match rng.randrange(3):
                case 0:
                    seq[i], active[i], chosen[i] = -1, True, None
                case 1:
                    last[i] = self._garbage()
                case _:
                    seq[i], active[i], chosen[i] = rng.randint(2, 9), True, None
        return {"seq": seq, "last": last, "active": active}, chosen

    def _loose(self) -> list[int]:
        """Live pages that belong to no sequence."""
        of_sequences = {slot // self.config.tokens for s in self.sequences for slot in s}
        return sorted(self.model.live() - of_sequences)

    def _whole(self) -> list[int]:
        """Slots of a live request, or of pages without one, from a page boundary on."""
        rng, ps = self.rng, self.config.tokens
        loose = self._loose()
        if self.sequences and rng.random() < 0.7:
            return rng.choice(self.sequences)[rng.choice([0, 0, ps, 2 * ps]) :][: self.loc_width]
        chosen = rng.sample(loose, min(len(loose), self.loc_width // ps, 3))
        return [page * ps + k for page in chosen for k in range(ps)]

    def _tokens(self) -> list[int]:
        rng, n, ps = self.rng, self.model.num_pages, self.config.tokens
        what = rng.random()
        if what < 0.3:
            slots = self._whole()
        elif what < 0.6:
            slots = self._whole()
            slots = rng.sample(slots, rng.randint(0, len(slots)))
        else:  # any pages: live, free, staged
            slots = [rng.randint(ps, (n + 1) * ps - 1) for _ in range(rng.randint(0, 5))]
        slots = slots[: self.loc_width - 4]
        if rng.random() < 0.3:
            slots = slots + rng.choices([0, self._garbage(), self._garbage(), *slots], k=rng.randint(1, 4))
            rng.shuffle(slots)
        return slots

    def _segment(self) -> list[int]:
        rng, ps = self.rng, self.config.tokens
        slots = self._whole()
        if rng.random() < 0.2:
            slots = slots[: self.loc_width - 2 * ps]
            slots = slots + [0] * (-len(slots) % ps) + [self._garbage()] * ps + slots[:ps]
        return slots

    def _pages(self) -> list[int]:
        rng, n = self.rng, self.model.num_pages
        ids = [slot // self.config.tokens for slot in self._whole()[:: self.config.tokens]][:4]
        if rng.random() < 0.4:
            ids += rng.choices([0, 0, -1, -7, n + 1, 2**31 - 1, *range(1, n + 1), *ids], k=rng.randint(1, 4))
            rng.shuffle(ids)
        return ids


class RowsDriver(Driver):
    """A request table alone."""

    LANES, TOKENS, SIZE, WIDTH = 5, 3, 7, 6

    def __init__(self):
        b, t, zeros = self.LANES, self.TOKENS, jnp.zeros(0, jnp.int32)
        self.fields = {
            "want": np.zeros(b, bool),
            "rows": _i32(b),
            "positions": _i32(b, t),
            "locs": _i32(b, t),
            "valid": np.zeros((b, t), bool),
        }

        def alloc(pool, x):
            pool, rows, ok = pool.alloc_rows(x["want"])
            return pool, ok, rows

        self.kernels = {
            "alloc_rows": alloc,
            "free_rows": lambda p, x: (p.free_rows(x["rows"]), True, zeros),
            "write": lambda p, x: (p.write(x["rows"], x["positions"], x["locs"], x["valid"]), True, zeros),
            "locs": lambda p, x: (p, True, p.locs(x["rows"], x["positions"]).reshape(-1)),
            "clear": lambda p, x: (p.clear(), True, zeros),
        }

    @property
    def width(self) -> int:
        return self.LANES * self.TOKENS

    def start(self):
        return ReqToTokenPool.create(self.SIZE, self.WIDTH)

    def reset(self, seed: int) -> None:
        self.rng, self.model = random.Random(seed), model.Rows(self.SIZE, self.WIDTH)

    def observe(self, state) -> dict[str, Any]:
        return observe_rows(state)

    def conserved(self) -> None:
        assert sorted([*self.model.free, *self.model.live()]) == list(range(1, self.SIZE + 1))

    def invent(self) -> Step:
        rng, m = self.rng, self.model
        kind = rng.choices(list(self.kernels), weights=[6, 6, 4, 2, 0.2])[0]
        args: Args = {}
        out: list[int] | None = []
        rows = rng.sample(range(0, self.SIZE + 1), rng.randint(0, self.LANES - 1))
        rows += rng.choices([0, -1, self.SIZE + 1, 2**31 - 1, -(2**31), *rows], k=rng.randint(0, 1))
        rng.shuffle(rows)
        full = rows + [0] * (self.LANES - len(rows))
        cells = [(i, j) for i in range(self.LANES) for j in range(self.TOKENS)]
        positions = np.zeros((self.LANES, self.TOKENS), np.int64)
        for i in range(self.LANES):  # which of two writes to one place wins is undefined: no row or column twice
            positions[i] = rng.sample([*range(self.WIDTH), -1, -6, self.WIDTH, 2**31 - 1], self.TOKENS)
        match kind:
            case "alloc_rows":
                args = {"want": [rng.random() < rng.choice([0.2, 0.6, 1]) for _ in range(self.LANES)]}
                out = m.alloc(args["want"])
            case "free_rows":
                args = {"rows": rows}
                m.release(rows)
            case "write":
                first = [row not in full[:i] for i, row in enumerate(full)]
                valid = np.zeros((self.LANES, self.TOKENS), bool)
                for i, j in cells:
                    valid[i, j] = first[i] and rng.random() < 0.8
                locs = np.array([[rng.randint(-9, 99) for _ in range(self.TOKENS)] for _ in full])
                args = {"rows": full, "positions": positions, "locs": locs, "valid": valid}
                m.write(full, positions, locs, valid)
            case "locs":
                args = {"rows": full, "positions": positions}
                out = [
                    int(m.table[row, at]) if 1 <= row <= self.SIZE and 0 <= at < self.WIDTH else 0
                    for row, line in zip(full, positions.tolist(), strict=True)
                    for at in line
                ]
            case "clear":
                m.clear()
        return Step(kind, args, out is not None, out or [], modelled_rows(m))


def observe_rows(pool: ReqToTokenPool) -> dict[str, Any]:
    return {
        "rows": pool.to_list(),
        "generation": np.asarray(pool.generation).tolist(),
        "table": np.asarray(pool.req_to_token).tolist(),
        "row faults": int(pool.faults),
    }


def modelled_rows(rows: model.Rows) -> dict[str, Any]:
    return {
        "rows": rows.free.copy(),
        "generation": rows.generation.copy(),
        "table": rows.table.tolist(),
        "row faults": rows.faults,
    }


class LedgerDriver(Driver):
    """Rows and pages together, with pages that belong to a prefix tree."""

    LANES, ROWS = 3, 5

    def __init__(self, config: Config):
        self.config, ps = config, config.tokens
        self.context = 5 * ps + 3
        self.capacity = 4 * ps + 6
        self.known = 2 * ps + 2  # longest prefix of a new row
        b = self.LANES
        self.fields = {
            "rows": _i32(b),
            "prefix": _i32(b),
            "seq": _i32(b),
            "prefix_loc": _i32(b, self.known),
            "owned_from": _i32(b),
            "active": np.zeros(b, bool),
            "need": _i32(),
            "pages": _i32(6),
            "tree": _i32(config.modelled().num_pages),  # pages of the tree after the operation
        }
        capacity, zeros = self.capacity, jnp.zeros(0, jnp.int32)

        def extend(ledger, x):
            ledger, rows, loc, ok = alloc_for_extend(ledger, x["rows"], x["prefix"], x["seq"], capacity=capacity)
            return ledger, ok, jnp.concatenate([rows, loc])

        def extend_prefix(ledger, x):
            ledger, rows, loc, ok = alloc_for_extend(
                ledger,
                x["rows"],
                x["prefix"],
                x["seq"],
                capacity=capacity,
                prefix_loc=x["prefix_loc"],
                owned_from=x["owned_from"],
            )
            return ledger, ok, jnp.concatenate([rows, loc])

        def decode(ledger, x):
            ledger, loc, position, ok = alloc_for_decode(ledger, x["rows"], x["active"])
            return ledger, ok, jnp.concatenate([loc, position])

        def commit(ledger, x):
            ledger, ok = set_committed(ledger, x["rows"], x["seq"])
            return ledger, ok, zeros

        def tree_alloc(ledger, x):
            allocator, loc, ok = ledger.allocator.alloc(x["need"], capacity=capacity)
            return Ledger(ledger.table, allocator, ledger.lens), ok, loc

        def tree_free(ledger, x):
            return Ledger(ledger.table, ledger.allocator.free_page_ids(x["pages"]), ledger.lens), True, zeros

        self.kernels = {
            "extend": extend,
            "extend_prefix": extend_prefix,
            "decode": decode,
            "release": lambda ledger, x: (release_rows(ledger, x["rows"]), True, zeros),
            "set_committed": commit,
            "tree_alloc": tree_alloc,
            "tree_free": tree_free,
            "clear": lambda ledger, x: (ledger.clear(), True, zeros),
        }

    @property
    def width(self) -> int:
        return max(self.LANES + self.capacity, 2 * self.LANES)

    def start(self):
        return Ledger.create(ReqToTokenPool.create(self.ROWS, self.context), self.config.real())

    def reset(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = model.Ledger(model.Rows(self.ROWS, self.context), self.config.modelled())
        self.tree: list[list[int]] = []  # runs of pages that belong to the prefix tree

    def observe(self, state) -> dict[str, Any]:
        return _listed(state.allocator) | observe_rows(state.table) | {"lens": np.asarray(state.lens).tolist()}

    def flags(self, state, x) -> jax.Array:
        return check_invariants(state, x["tree"]).any()

    def conserved(self) -> None:
        m, tree = self.model, [page for run in self.tree for page in run]
        owned = [page for row in m.rows.live() for page in m.owned_pages(row)]
        _partition(m.allocator, [*owned, *tree])
        borrowed = {page for row in m.rows.live() for page in m.borrowed_pages(row)}
        assert borrowed <= {*owned, *tree}, "the driver let a shared page go"
        for row in m.rows.live():  # ... and had the same call hand it to the row that borrows it
            pages = [*m.borrowed_pages(row), *m.owned_pages(row)]
            assert len(set(pages)) == len(pages), "the driver let a shared page go"

    # --- inventing -----------------------------------------------------------------------------------------------

    def invent(self) -> Step:
        rng, m, ps = self.rng, self.model, self.config.tokens
        kind = rng.choices(list(self.kernels), weights=[6, 5, 14, 5, 3, 2, 2, 0.15])[0]
        args: Args = {}
        ok, out = True, []
        match kind:
            case "extend" | "extend_prefix":
                args, result = self._extended(kind == "extend_prefix")
                ok = result is not None
                out = result[0] + result[1] if result is not None else []
            case "decode":
                args = {"rows": self._rows(), "active": [rng.random() < 0.9 for _ in range(self.LANES)]}
                result = m.alloc_for_decode(args["rows"], args["active"])
                ok = result is not None
                out = result[0] + result[1] if result is not None else []
            case "release":
                rows = [row for row in self._rows() if not self._needed(row, 0)]
                if rows and rng.random() < 0.3:
                    rows = (rows + rng.choices(rows, k=2))[: self.LANES]
                args = {"rows": rows}
                m.release(rows)
            case "set_committed":
                rows = self._rows()
                args = {"rows": rows, "seq": [self._length(row) for row in rows]}
                ok = m.set_committed(rows, args["seq"])
            case "tree_alloc":
                args = {"need": rng.randint(1, 2) * ps}
                loc = m.allocator.alloc(args["need"], self.capacity)
                ok, out = loc is not None, loc or []
                if loc:
                    self.tree.append([slot // ps for slot in loc[::ps]])
            case "tree_free":
                pages = [0, -1, m.allocator.num_pages + 1, *m.allocator.free[:1]]
                going = [r for r in self.tree if not self._borrowed() & set(r)][:1]
                if going:
                    self.tree.remove(going[0])
                args = {"pages": [*going[0], *rng.sample(pages, 2)] if going else pages}
                rng.shuffle(args["pages"])
                m.allocator.release_pages(args["pages"])
            case "clear":
                self.tree = []
                m.clear()
        args["tree"] = [page for run in self.tree for page in run]
        m = self.model
        after = _modelled(m.allocator) | modelled_rows(m.rows) | {"lens": [line.copy() for line in m.lens]}
        return Step(kind, args, ok, out, after)

    def _borrowed(self) -> set[int]:
        return {page for row in self.model.rows.live() for page in self.model.borrowed_pages(row)}

    def _needed(self, row: int, prefix: int) -> bool:
        """Another row borrows a page that this one would give back when cut to `prefix` tokens."""
        m = self.model
        return m.rows.is_live(row) and bool(self._borrowed() & set(m.owned_pages(row, prefix)))

    def _rows(self) -> list[int]:
        """Live rows, padding, and now and then a row that is not one."""
        rng, live = self.rng, self.model.rows.live()
        rows = rng.sample(live, min(len(live), self.LANES))
        rows = [row if rng.random() < 0.8 else 0 for row in rows] + [0] * (self.LANES - len(rows))
        if rng.random() < 0.12:
            wrong = [*self.model.rows.free[-1:], -1, -2, self.ROWS + 1, 2**31 - 1, -(2**31), *rows]
            rows[rng.randrange(self.LANES)] = rng.choice(wrong)
        rng.shuffle(rows)
        return rows

    def _length(self, row: int) -> int:
        rng = self.rng
        if not self.model.rows.is_live(row):
            return rng.choice([0, 3, -1])
        allocated = self.model.lens[row][1]
        wrong = rng.choice([-1, allocated + 1])
        return rng.choice([allocated, allocated, rng.randint(0, allocated), rng.randint(0, allocated), 0, wrong])

    def _extended(self, with_prefix: bool) -> tuple[Args, tuple[list[int], list[int]] | None]:
        """An extend, carried out. Calls that would take a page from its readers are the caller's fault, which no
        table shows: they are thrown away."""
        before, tree = self.model, self.tree
        while True:
            args, taken = self._extend(with_prefix)
            self.model, self.tree = copy.deepcopy(before), tree.copy()
            more = (args["prefix_loc"], args["owned_from"]) if with_prefix else ()
            result = self.model.alloc_for_extend(args["rows"], args["prefix"], args["seq"], self.capacity, *more)
            if result is not None:
                for run, own in taken:
                    self.tree = [r if r is not run else r[:own] for r in self.tree]
            self.tree = [r for r in self.tree if r]
            try:
                self.conserved()
            except AssertionError:
                self.model, self.tree = before, tree
            else:
                return args, result

    def _extend(self, with_prefix: bool) -> tuple[Args, list[tuple[list[int], int]]]:
        """Arguments of an extend, and the tree's runs that new rows take over (from which page of the run on)."""
        rng, m, ps = self.rng, self.model, self.config.tokens
        rows, prefix, seq, own, known, taken = [], [], [], [], [], []
        left, chosen = self.capacity, [row for row in self._rows() if row > 0]
        for _ in range(self.LANES):
            row = chosen.pop() if chosen and rng.random() < 0.5 else rng.choice([-1, -1, 0])
            p, slots, start = 0, [], 0
            if row > 0 and m.rows.is_live(row):
                committed, allocated, _ = m.lens[row]
                p = rng.choice([allocated, allocated, committed, rng.randint(0, allocated)])
            elif row == -1 and with_prefix and rng.random() < 0.8:
                slots, p, start, run = self._prefix()
                if any(run is r for r, _ in taken):  # two rows must not take over one run
                    slots, p, start = [], 0, 0
                elif start < model.up(p, ps):
                    taken.append((run, start // ps))
            new = 0 if row == 0 else min(rng.choice([0, 1, ps, ps + 1, rng.randint(0, 2 * ps)]), left)
            left -= new
            s = min(p + new, self.context) if rng.random() < 0.97 else p + new
            rows.append(row)
            prefix.append(p)
            seq.append(s)
            own.append(start)
            known.append(slots)
        if rng.random() < 0.15:  # wrong use
            i = rng.randrange(self.LANES)
            if rows[i] == -1 and prefix[i]:
                i = rows.index(0) if 0 in rows else i
            match rng.randrange(6):
                case 0:
                    seq[i] = prefix[i] - 1
                case 1:
                    prefix[i] = seq[i] = rng.choice([-1, -3])
                case 2:
                    seq[i] = rng.choice([self.context + 1, 2**31 - 1])
                case 3:
                    rows[i] = rng.choice([-2, self.ROWS + 1, *m.rows.free[:1], *rows])
                case 4:
                    own[i] = rng.choice([-ps, 1, model.up(prefix[i], ps) + ps])
                case _:
                    prefix[i], seq[i] = prefix[i] + self.known + 1, seq[i] + self.known + 1
        args = {"rows": rows, "prefix": prefix, "seq": seq}
        return (args | {"prefix_loc": self._padded(known), "owned_from": own} if with_prefix else args), taken

    def _padded(self, known: list[list[int]]) -> list[list[int]]:
        return [slots + [0] * (self.known - len(slots)) for slots in known]

    def _prefix(self) -> tuple[list[int], int, int, list[int]]:
        """(slots, length, owned_from, the tree's run) of a prefix in the tree or in another row."""
        rng, m, ps = self.rng, self.model, self.config.tokens
        rows = [row for row in m.rows.live() if m.lens[row][1]]
        if rows and (not self.tree or rng.random() < 0.4):  # shared with a row that goes on living
            row = rng.choice(rows)
            p = rng.randint(0, min(m.lens[row][0], self.known))
            return m.slots(row, 0, p), p, model.up(p, ps), []
        if not self.tree:
            return [], 0, 0, []
        run = rng.choice(self.tree)
        p = rng.randint(1, min(len(run) * ps, self.known))
        slots = [page * ps + k for page in run for k in range(ps)][:p]
        free_of_readers = not self._borrowed() & set(run)
        if free_of_readers and model.pages(p, ps) == len(run) and rng.random() < 0.5:
            return slots, p, rng.randrange(len(run)) * ps, run
        return slots, p, model.up(p, ps), run
