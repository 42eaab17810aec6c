"""What the request table, the allocators and the ledger should do, in plain Python: lists, sets and loops.

Written from SGLang's behaviour (a host list per allocator, pages popped from its front), not from kvjax's code.
Calls that kvjax refuses (ok == False) return None here and change nothing, except that a sorted merge which SGLang
makes before it finds memory short stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np

BESIDE_PADDING = -(2**40)  # the page that slots 1 .. page_size - 1 name in a release: none that exists


def pages(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens touch."""
    return -(-tokens // page_size)


def up(tokens: int, page_size: int) -> int:
    """`tokens`, rounded up to whole pages."""
    return pages(tokens, page_size) * page_size


class Rows:
    """Rows 1 .. size of a request table."""

    def __init__(self, size: int, width: int):
        self.size, self.width = size, width
        self.free = list(range(1, size + 1))
        self.generation = [0] * (size + 1)
        self.table = np.zeros((size + 1, width), np.int64)
        self.faults = 0

    def is_live(self, row: int) -> bool:
        return 1 <= row <= self.size and row not in self.free

    def live(self) -> list[int]:
        return [row for row in range(1, self.size + 1) if row not in self.free]

    def alloc(self, want: Sequence[bool]) -> list[int] | None:
        """One row for each lane that wants one (0 elsewhere): the last rows of the list, in list order."""
        need = sum(map(bool, want))
        if need > len(self.free):
            return None
        cut = len(self.free) - need
        new, self.free = iter(self.free[cut:]), self.free[:cut]
        rows = [next(new) if wanted else 0 for wanted in want]
        for row in filter(None, rows):
            self.generation[row] = (self.generation[row] + 1 + 2**31) % 2**32 - 2**31
        return rows

    def release(self, rows: Iterable[int]) -> None:
        refused = set()
        for row in rows:
            if self.is_live(row):
                self.free.append(row)
            elif row != 0:
                refused.add(row)
        self.faults += len(refused)

    def write(self, rows, positions, locs, valid) -> None:
        for i, row in enumerate(rows):
            for position, loc, wanted in zip(positions[i], locs[i], valid[i], strict=True):
                if wanted and 1 <= row <= self.size and 0 <= position < self.width:
                    self.table[row, position] = loc

    def clear(self) -> None:
        self.free = list(range(1, self.size + 1))


class Allocator:
    """Free and staged ids 1 .. num_pages, and the checks that page and token allocators share."""

    page_size: int

    def __init__(self, size: int, page_size: int, need_sort: bool):
        self.size, self.page_size, self.need_sort = size, page_size, need_sort
        self.num_pages = size // page_size
        self.faults = 0
        self.clear()

    def clear(self) -> None:
        self.free, self.staged = list(range(1, self.num_pages + 1)), []

    def live(self) -> set[int]:
        return set(range(1, self.num_pages + 1)) - set(self.free) - set(self.staged)

    def available(self) -> int:
        return (len(self.free) + len(self.staged)) * self.page_size

    def merge(self) -> None:
        if self.staged:
            self.free, self.staged = sorted(self.free + self.staged), []

    def pop(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def split(self, ids: Iterable[int]) -> tuple[list[int], set[int]]:
        """(ids that may be released, each once, in the given order; ids that are refused)."""
        live, good, refused = self.live(), [], set()
        for number in ids:
            if number in live and number not in good:
                good.append(number)
            else:
                refused.add(number)
        return good, refused

    @staticmethod
    def new_tokens(prefix: Sequence[int], seq: Sequence[int], capacity: int) -> list[int] | None:
        new = [s - p for p, s in zip(prefix, seq, strict=True)]
        legal = all(p >= 0 for p in prefix) and all(n >= 0 for n in new) and sum(new) <= capacity
        return new if legal else None


class TokenAllocator(Allocator):
    """First in, first out."""

    def __init__(self, size: int, need_sort: bool = False):
        super().__init__(size, 1, need_sort)

    def alloc(self, need: int, capacity: int) -> list[int] | None:
        if need < 0 or need > capacity:
            return None
        if need > len(self.free):
            self.merge()
        return self.pop(need) if need <= len(self.free) else None

    def alloc_extend(self, prefix, seq, last, capacity: int, num_lanes: int | None = None) -> list[int] | None:
        new = self.new_tokens(prefix, seq, capacity)
        return None if new is None else self.alloc(sum(new), capacity)

    def alloc_decode(self, seq, last, active) -> list[int] | None:
        if any(a and s < 0 for a, s in zip(active, seq, strict=True)):
            return None
        takes = [a and s > 0 for a, s in zip(active, seq, strict=True)]
        slots = self.alloc(sum(takes), len(takes))
        if slots is None:
            return None
        new = iter(slots)
        return [next(new) if t else 0 for t in takes]

    def release(self, slots: Iterable[int]) -> None:
        good, refused = self.split(s for s in slots if s != 0)
        (self.staged if self.need_sort else self.free).extend(good)
        self.faults += len(refused)

    release_tokens = release_segment = release_pages = release

    def release_group(self, tokens=(), segments=(), page_ids=()) -> None:
        self.release([*tokens, *(s for segment in segments for s in segment), *page_ids])


class PagedAllocator(Allocator):
    """Pages popped from the front; a release goes to the front as one block."""

    def alloc(self, need: int, capacity: int) -> list[int] | None:
        if need < 0 or need > capacity or need % self.page_size:
            return None
        count = need // self.page_size
        if count > len(self.free):
            self.merge()
        if count > len(self.free):
            return None
        return [page * self.page_size + k for page in self.pop(count) for k in range(self.page_size)]

    def continues(self, prefix: int, last: int) -> bool:
        """Whether `last` can be the slot of token prefix - 1, for a prefix that ends inside a page."""
        ps = self.page_size
        return prefix % ps == 0 or (last // ps in self.live() and last % ps == (prefix - 1) % ps)

    def alloc_extend(self, prefix, seq, last, capacity: int, num_lanes: int | None = None) -> list[int] | None:
        ps, new = self.page_size, self.new_tokens(prefix, seq, capacity)
        if new is None or not all(self.continues(p, at) for p, n, at in zip(prefix, new, last, strict=True) if n):
            return None
        counted = sum(n > 0 for n in new)
        bound = sum(new) // ps + max(counted, num_lanes or 0) + 1
        if bound > len(self.free):
            self.merge()
        need = sum(pages(s, ps) - pages(p, ps) for p, s in zip(prefix, seq, strict=True))
        if need > len(self.free):
            return None
        out = []
        for p, s, at in zip(prefix, seq, last, strict=True):
            slot = at
            for position in range(p, s):
                slot = self.pop(1)[0] * ps if position % ps == 0 else slot + 1
                out.append(slot)
        return out

    def alloc_decode(self, seq, last, active) -> list[int] | None:
        ps = self.page_size
        lanes = [(s, at) for s, at, a in zip(seq, last, active, strict=True) if a]
        if any(s < 0 for s, _ in lanes) or not all(self.continues(s - 1, at) for s, at in lanes if s > 0):
            return None
        if len(lanes) > len(self.free):
            self.merge()
        if sum(s > 0 and (s - 1) % ps == 0 for s, _ in lanes) > len(self.free):
            return None
        out = []
        for s, at, a in zip(seq, last, active, strict=True):
            if not a or s == 0:
                out.append(0)
            else:
                out.append(self.pop(1)[0] * ps if (s - 1) % ps == 0 else at + 1)
        return out

    def page(self, slot: int) -> int:
        """The page of a slot; an id of its own for the slots that share page 0 with the padding slot."""
        return BESIDE_PADDING if 0 < slot < self.page_size else slot // self.page_size

    def give(self, good: list[int]) -> None:
        if self.need_sort:
            self.staged += good
        else:
            self.free = good + self.free

    def release_tokens(self, slots: Iterable[int]) -> None:
        self.release_group(tokens=slots)

    def release_segment(self, slots: Sequence[int]) -> None:
        self.release_group(segments=[slots])

    def release_pages(self, page_ids: Iterable[int]) -> None:
        self.release_group(page_ids=page_ids)

    def release_group(self, tokens=(), segments=(), page_ids=()) -> None:
        """Token sets as one release, ascending; then segments and page ids as a second one, in row order."""
        touched = {self.page(s) for s in tokens if s != 0}
        good, refused = self.split(touched)
        self.give(sorted(good))
        listed = [self.page(s) for segment in segments for s in segment[:: self.page_size] if s != 0]
        good, also = self.split([*listed, *(p for p in page_ids if p != 0)])
        self.give(good)
        self.faults += len(refused | also)


class Ledger:
    """Rows, an allocator, and for every row [committed, allocated, owned_from]."""

    def __init__(self, rows: Rows, allocator: TokenAllocator | PagedAllocator):
        self.rows, self.allocator = rows, allocator
        self.lens = [[0, 0, 0] for _ in range(rows.size + 1)]

    def slots(self, row: int, start: int, end: int) -> list[int]:
        return self.rows.table[row, start:end].tolist()

    def owned_pages(self, row: int, start: int = 0) -> list[int]:
        """Pages of the row's tokens from `start` (or from owned_from) to the last, in row order."""
        ps, (_, allocated, own) = self.allocator.page_size, self.lens[row]
        return [int(s) // ps for s in self.slots(row, max(up(start, ps), own), allocated)[::ps]]

    def borrowed_pages(self, row: int) -> list[int]:
        ps, (_, allocated, own) = self.allocator.page_size, self.lens[row]
        return [int(s) // ps for s in self.slots(row, 0, min(own, allocated))[::ps]]

    def alloc_for_extend(
        self, rows, prefix, seq, capacity, prefix_loc=None, owned_from=None, num_lanes=None
    ) -> tuple[list[int], list[int]] | None:
        ps, lanes = self.allocator.page_size, range(len(rows))
        held = [row for row in rows if row > 0]
        if len(set(held)) < len(held) or sum(row == -1 for row in rows) > len(self.rows.free):
            return None
        own, last = [0] * len(rows), [-1] * len(rows)
        begun: list[list[int]] = [[] for _ in rows]  # pages of a prefix found elsewhere
        for i in lanes:
            if not 0 <= prefix[i] <= seq[i] <= self.rows.width:
                return None
            if rows[i] == 0:
                if seq[i] != prefix[i]:
                    return None
                continue
            if rows[i] == -1:
                own[i] = up(prefix[i], ps) if owned_from is None else owned_from[i]
                known = 0 if prefix_loc is None else len(prefix_loc[i])
                if own[i] % ps or not 0 <= own[i] <= up(prefix[i], ps):
                    return None
                before = [] if prefix_loc is None else prefix_loc[i]
            elif self.rows.is_live(rows[i]):
                known = self.lens[rows[i]][0]
                own[i] = min(self.lens[rows[i]][2], up(prefix[i], ps))
                before = self.slots(rows[i], 0, known)
            else:
                return None
            if prefix[i] > known:
                return None
            if prefix[i]:
                last[i] = int(before[prefix[i] - 1])
            if seq[i] > prefix[i] and prefix[i] % ps and own[i] > prefix[i] // ps * ps:
                return None  # the page that would be continued is somebody else's
            if rows[i] == -1:
                found = [int(slot) for slot in before[: prefix[i]]]
                begun[i] = [slot // ps for slot in found[::ps]]
                if not all(1 <= page <= self.allocator.num_pages for page in begun[i]):
                    return None
                if found != [page * ps + k for page in begun[i] for k in range(ps)][: len(found)]:
                    return None

        need = sum(pages(s, ps) - pages(p, ps) for p, s in zip(prefix, seq, strict=True))
        back = [p for i in lanes if rows[i] > 0 and seq[i] > prefix[i] for p in self.owned_pages(rows[i], prefix[i])]
        if any(set(back) & set(pages_found) for pages_found in begun):
            return None  # a row would begin with a page that this call gives back
        if need > self.allocator.available() // ps + len(back):
            assert self.allocator.alloc_extend(prefix, seq, last, capacity, num_lanes) is None  # a merge may stay
            return None
        after = copy.deepcopy(self.allocator)
        after.release_pages(back)
        loc = after.alloc_extend(prefix, seq, last, capacity, num_lanes)
        if loc is None:
            return None
        self.allocator = after
        fresh = self.rows.alloc([row == -1 for row in rows])
        assert fresh is not None
        rows, at = [f or row for f, row in zip(fresh, rows, strict=True)], 0
        for i in lanes:
            if rows[i] == 0 or (not fresh[i] and seq[i] == prefix[i]):
                continue
            if fresh[i] and prefix_loc is not None:
                self.rows.table[rows[i], : prefix[i]] = prefix_loc[i][: prefix[i]]
            self.rows.table[rows[i], prefix[i] : seq[i]] = loc[at : at + seq[i] - prefix[i]]
            at += seq[i] - prefix[i]
            self.lens[rows[i]] = [seq[i], seq[i], own[i]]
        return rows, loc

    def alloc_for_decode(self, rows, active) -> tuple[list[int], list[int]] | None:
        ps = self.allocator.page_size
        used = [row if a else 0 for row, a in zip(rows, active, strict=True)]
        held = [row for row in used if row]
        if len(set(held)) < len(held) or not all(map(self.rows.is_live, held)):
            return None
        for row in held:
            committed, _, own = self.lens[row]
            if committed >= self.rows.width or own > committed // ps * ps:
                return None  # full, or the token would land in somebody else's page
        position = [self.lens[row][0] if row else 0 for row in used]
        opens = [row > 0 and at == self.lens[row][1] for row, at in zip(used, position, strict=True)]
        last = [int(self.rows.table[row, at - 1]) if row and at else -1 for row, at in zip(used, position, strict=True)]
        seq = [at + 1 if o else 0 for at, o in zip(position, opens, strict=True)]
        new = self.allocator.alloc_decode(seq, last, opens)
        if new is None:
            return None
        loc = [0] * len(rows)
        for i, row in enumerate(used):
            if row:
                loc[i] = new[i] if opens[i] else int(self.rows.table[row, position[i]])
                self.rows.table[row, position[i]] = loc[i]
                self.lens[row][:2] = [position[i] + 1, max(position[i] + 1, self.lens[row][1])]
        return loc, position

    def release(self, rows: Sequence[int]) -> None:
        going = list(dict.fromkeys(row for row in rows if self.rows.is_live(row)))
        self.allocator.release_pages([page for row in going for page in self.owned_pages(row)])
        for row in going:
            self.lens[row] = [0, 0, 0]
        self.rows.release(rows)

    def set_committed(self, rows, committed) -> bool:
        held = [(row, n) for row, n in zip(rows, committed, strict=True) if row != 0]
        if len({row for row, _ in held}) < len(held):
            return False
        if not all(self.rows.is_live(row) and 0 <= n <= self.lens[row][1] for row, n in held):
            return False
        for row, n in held:
            self.lens[row][0] = n
        return True

    def clear(self) -> None:
        self.rows.clear()
        self.allocator.clear()
        self.lens = [[0, 0, 0] for _ in range(self.rows.size + 1)]
