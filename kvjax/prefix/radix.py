"""RadixCache: which prefixes are in the pool, and in which slots (SGLang: RadixCache).

Plain Python and numpy. Time is a counter, so two runs of the same calls evict the same leaves. The tree holds no
allocator: `evict` returns slots, and its caller queues their release on the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.layout import host_int32, positive, round_down

POLICIES = ("lru", "lfu", "fifo")
EMPTY = np.zeros(0, np.int32)


class Node:
    """A run of tokens and their slots. The path from the root to a node is a cached prefix."""

    __slots__ = (
        "children", "created", "dead", "hits", "in_heap", "key", "locks", "owner", "parent", "state", "used", "value"
    )  # fmt: skip

    def __init__(self, key: np.ndarray, value: np.ndarray, parent: Node | None, created: int):
        self.key = key  # i32[n], token ids; n a multiple of the page
        self.value = value  # i32[n], slots
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by the first page of their keys
        self.created = created
        self.used = created  # last access
        self.hits = 0
        self.locks = 0  # requests whose prefix ends here or below
        self.owner: Hashable = None  # request that inserted the node
        self.dead = False  # its window-side slots are gone (sliding-window models)
        self.state: int | None = None  # recurrent state slot after its last token
        self.in_heap = False


class Match(NamedTuple):
    """What of a key is cached: slots i32[n], and the node that the prefix ends in."""

    slots: np.ndarray
    node: Node

    @property
    def length(self) -> int:
        """Tokens, a multiple of the page."""
        return len(self.slots)


class Peek(NamedTuple):
    """What a match would find, in tokens: cached, and how many of these a lock would take from the evictable ones."""

    length: int
    unlocked: int


class RadixCache:
    """A tree of cached prefixes with whole pages. `evictable` + `protected` = tokens in the tree.

    policy: which leaf goes first: "lru" the least recently used, "lfu" the least often inserted (then lru), "fifo" the
    oldest; ties by creation. window: of a sliding-window model, tokens; recurrent: of a model with state slots. Both
    cut a match to what can be resumed.
    """

    def __init__(self, page_size: int, *, policy: str = "lru", window: int = 0, recurrent: bool = False):
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} came; {', '.join(POLICIES)} are there.")
        self.page_size = positive("page_size", page_size)
        self.policy, self.window, self.recurrent = policy, window, recurrent
        self.version = 0  # rises with every insert and eviction: a peek from the same version still holds
        self._roots: dict[Hashable, Node] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything. The slots are not returned: whoever resets the tree resets the allocator."""
        for node in list(self.walk_nodes()):
            node.parent = None  # whoever remembers a node sees that it is gone
        self._clock = 0
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._roots.clear()
        self.evictable = 0  # tokens of nodes that nobody has locked
        self.protected = 0  # tokens of locked nodes
        self.swa_evictable = 0  # of the evictable ones, those with window-side slots
        self.nodes = 0
        self.version += 1
        self.freed_states: list[int] = []  # state slots of evicted nodes; the caller releases them and empties the list

    # --- looking up ------------------------------------------------------------------------------------------------

    def match_prefix(self, key: Sequence[int] | np.ndarray, extra_key: Hashable = None) -> Match:
        """The longest cached prefix of key, in whole pages. Stamps what it walks; splits a node it ends inside.

        A request must compute at least one token, so it asks with its tokens but the last one. extra_key: namespace.
        """
        tokens, time = self._tokens(key), self._tick()
        node, found, values = self._root(extra_key), 0, []
        for child, common in self._walk(node, tokens):
            child.used = time
            if common < len(child.key):
                if self.recurrent:  # a state belongs to the end of a node; there is none inside
                    break
                child = self._split(child, common)
            node, found = child, found + common
            values.append(child.value)
        node, found = self._resumable(node, found)
        slots = np.concatenate(values)[:found] if values else EMPTY
        return Match(slots, node)

    def peek(self, key: Sequence[int] | np.ndarray, extra_key: Hashable = None) -> Peek:
        """What `match_prefix` would find, without a stamp and without a split."""
        tokens = self._tokens(key)
        found = unlocked = 0
        root = self._roots.get(extra_key)
        if root is None or not len(tokens):
            return Peek(0, 0)
        path: list[tuple[Node, int]] = []
        for child, common in self._walk(root, tokens):
            if common < len(child.key) and self.recurrent:
                break
            path.append((child, common))
            found += common
        if self.window or self.recurrent:
            found = self._resumable_length(path)
        end = 0
        for child, common in path:
            if end + common > found:
                break
            end += common
            unlocked += 0 if child.locks else common
        return Peek(found, unlocked)

    def walk_on(
        self, key: np.ndarray, extra_key: Hashable, node: Node | None, depth: int
    ) -> tuple[Node | None, int, int]:
        """Go on with a peek from a node that ends `depth` tokens into the key (None: from the root).

        Returns (last node that matches as a whole, where it ends, cached tokens). Changes nothing.
        """
        start = self._roots.get(extra_key) if node is None else node
        tokens, found = self._tokens(key), depth
        if start is not None:
            for child, common in self._walk(start, tokens[depth:]):
                found += common
                if common == len(child.key):
                    node, depth = child, found
        return node, depth, found

    # --- growing ---------------------------------------------------------------------------------------------------

    def insert(
        self,
        key: Sequence[int] | np.ndarray,
        value: Sequence[int] | np.ndarray,
        extra_key: Hashable = None,
        *,
        owner: Hashable = None,
        swa_evicted: int = 0,
        state: int | None = None,
    ) -> int:
        """Take over the slots of key that the tree does not have yet; returns how many tokens it had before.

        key, value: token ids and their slots, both cut to whole pages. Slots before the returned length stay with the
        caller, who gives back those it owns and rewrites its row to the tree's; so do slots behind the last whole
        page. owner: the request; nodes that it inserted earlier get no further hit. swa_evicted: tokens before it
        have no window-side slots any more. state: recurrent state slot after the last token.
        """
        tokens = self._tokens(key)
        slots = host_int32("value", value)[: len(tokens)]
        if len(slots) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens in whole pages came with {len(slots)} slots; one slot per token.")
        time = self._tick()
        node, had = self._root(extra_key), 0
        for child, common in self._walk(node, tokens):
            child.used = time
            if common < len(child.key):
                child = self._split(child, common)
            if owner is None or child.owner != owner:
                child.hits += 1
            node, had = child, had + common
        dead = min(-(-swa_evicted // self.page_size) * self.page_size, len(tokens)) if self.window else 0
        if had < len(tokens) > dead:  # a suffix without any window-side slot could never be resumed from
            for start, end in ((had, max(had, dead)), (max(had, dead), len(tokens))):
                if start < end:
                    node = self._add(node, tokens[start:end], slots[start:end], owner, start < dead)
        if state is not None:
            if node.state is None and len(tokens):
                node.state = state
            else:
                self.freed_states.append(state)
        return had

    def _add(self, parent: Node, key: np.ndarray, value: np.ndarray, owner: Hashable, dead: bool) -> Node:
        leaf = Node(key.copy(), value.copy(), parent, self._tick())
        leaf.owner, leaf.hits, leaf.dead = owner, 1, dead
        parent.children[self._first_page(key)] = leaf
        self.nodes += 1
        self.version += 1
        self._count(leaf, len(key), 0)
        self._offer(leaf)
        return leaf

    # --- keeping ---------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """Pin a node and everything above it; returns the change of `evictable` (0 or negative).

        ValueError for a node that was evicted since it was matched: its slots may be another request's.
        """
        if node.parent is None and len(node.key):
            raise ValueError(
                f"this node of {len(node.key)} tokens is not in the tree any more, so it can not be locked; match the "
                "prefix again."
            )
        before = self.evictable
        while node.parent is not None:
            if node.locks == 0:
                self._count(node, -len(node.key), len(node.key))
            node.locks += 1
            node = node.parent
        return self.evictable - before

    def unlock(self, node: Node) -> int:
        """Undo one `lock` of this node; returns the change of `evictable`. ValueError when it is not locked."""
        before, start = self.evictable, node
        if node.parent is not None and node.locks <= 0:
            raise ValueError("this node is not locked, so it can not be unlocked; every lock is undone once.")
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self._count(node, len(node.key), -len(node.key))
            node = node.parent
        if start.parent is not None:
            self._offer(start)
        return self.evictable - before

    def evict(self, n: int) -> list[np.ndarray]:
        """Drop whole leaves, by policy, until `n` tokens are free or nothing unlocked is left; slots leaf by leaf.

        May return more than n, as a leaf goes as a whole; n = 0 drops nothing.
        """
        pieces, freed = [], 0
        while freed < n and self._heap:
            priority, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.children or node.locks or node.parent is None:
                continue  # offered again when its last child goes, or when it is unlocked
            if priority != self._priority(node):
                self._offer(node)
                continue
            pieces.append(node.value)
            freed += len(node.value)
            self._drop(node)
        return pieces

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._first_page(leaf.key)]
        leaf.parent = None
        self.nodes -= 1
        self.version += 1
        self._count(leaf, -len(leaf.key), 0)
        if leaf.state is not None:
            self.freed_states.append(leaf.state)
        self._offer(parent)

    # --- reading ---------------------------------------------------------------------------------------------------

    def walk_nodes(self) -> Iterator[Node]:
        """Every node except the roots."""
        todo = [child for root in self._roots.values() for child in root.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def slots(self) -> np.ndarray:
        """i32[evictable + protected]: every slot that the tree owns, in no particular order."""
        values = [node.value for node in self.walk_nodes()]
        return np.concatenate(values) if values else EMPTY

    def pages(self) -> np.ndarray:
        """i32[...]: every page that the tree owns."""
        return self.slots()[:: self.page_size] // self.page_size

    # --- inside ----------------------------------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _root(self, extra_key: Hashable) -> Node:
        if extra_key not in self._roots:
            self._roots[extra_key] = Node(EMPTY, EMPTY, None, 0)
        return self._roots[extra_key]

    def _tokens(self, key: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = host_int32("key", key)
        return tokens[: round_down(len(tokens), self.page_size)]

    def _first_page(self, key: np.ndarray) -> bytes:
        return key[: self.page_size].tobytes()

    def _walk(self, node: Node, tokens: np.ndarray) -> Iterator[tuple[Node, int]]:
        """(child, tokens that match, in whole pages) down the tree; the last child may match in part."""
        at = 0
        while at < len(tokens):
            child = node.children.get(self._first_page(tokens[at:]))
            if child is None:
                return
            ours = tokens[at : at + len(child.key)]
            same = ours == child.key[: len(ours)]
            common = len(ours) if same.all() else round_down(int(same.argmin()), self.page_size)
            partial = common < len(child.key)
            yield child, common
            if partial:
                return
            node, at = child, at + common

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; the new upper one is returned, the lower one stays the node that locks refer to."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.key[:at], node.value[:at], parent, self._tick())
        upper.hits, upper.locks, upper.owner, upper.dead = node.hits, node.locks, node.owner, node.dead
        parent.children[self._first_page(upper.key)] = upper
        node.key, node.value, node.parent = node.key[at:], node.value[at:], upper
        upper.children[self._first_page(node.key)] = node
        self.nodes += 1
        return upper

    def _resumable(self, node: Node, found: int) -> tuple[Node, int]:
        if not self.window and not self.recurrent:
            return node, found
        path: list[tuple[Node, int]] = []
        while node.parent is not None:
            path.append((node, len(node.key)))
            node = node.parent
        path.reverse()
        keep, end, last = self._resumable_length(path), 0, node
        for child, length in path:
            if end + length > keep:
                break
            end, last = end + length, child
        return last, keep

    def _resumable_length(self, path: list[tuple[Node, int]]) -> int:
        """Tokens of the path that can be resumed from: a state at the end, a whole window of live slots before it."""
        best = end = run = 0
        whole = True  # no dead node so far: everything that there is is mapped
        for node, length in path:
            end += length
            run, whole = (0, False) if node.dead else (run + length, whole)
            alive = not self.window or whole or run >= self.window
            if alive and (not self.recurrent or node.state is not None):
                best = end
        return best

    def _count(self, node: Node, evictable: int, protected: int) -> None:
        self.evictable += evictable
        self.protected += protected
        if self.window and not node.dead:
            self.swa_evictable += evictable

    def _priority(self, node: Node) -> tuple[int, ...]:
        if self.policy == "lru":
            return (node.used,)
        return (node.hits, node.used) if self.policy == "lfu" else (node.created,)

    def _offer(self, node: Node) -> None:
        """Put a leaf on the heap. Priorities only rise, so an outdated entry is too early, never too late."""
        if not (node.in_heap or node.children or node.locks or node.parent is None):
            node.in_heap = True
            heapq.heappush(self._heap, (self._priority(node), node.created, node))


def released_pages(pieces: Sequence[np.ndarray], page_size: int, to_front: bool) -> np.ndarray:
    """Pages of evicted pieces as one release that leaves the free list as releasing leaf by leaf would.

    to_front: the allocator puts released pages in front of its list (pages without need_sort), so the leaf that went
    last must come first.
    """
    if not pieces:
        return EMPTY
    order = reversed(pieces) if to_front else pieces
    return np.concatenate([piece[::page_size] // page_size for piece in order])
