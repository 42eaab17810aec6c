"""What the recorded traces do not show: policies, locks, what can be resumed, and a random model check."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.prefix import RadixCache, released_pages


def tokens(text):
    return [ord(c) for c in text]


def slots(start, n):
    return list(range(start, start + n))


def test_a_locked_node_is_not_evicted_itself():
    tree = RadixCache(1)
    tree.insert(slots(1, 8), slots(101, 8))
    match = tree.match_prefix(slots(1, 8))
    assert tree.lock(match.node) == -8
    assert tree.evict(100) == []
    assert (tree.evictable, tree.protected) == (0, 8)
    assert tree.unlock(match.node) == 8
    assert (tree.evictable, tree.protected) == (8, 0)
    with pytest.raises(ValueError, match="not locked"):
        tree.unlock(match.node)
    assert tree.protected == 0


def test_a_key_below_a_page_matches_nothing_and_inserts_nothing():
    tree = RadixCache(4)
    assert tree.match_prefix([1, 2, 3]).length == 0
    assert tree.insert([1, 2, 3], [5, 6, 7]) == 0
    assert tree.nodes == 0
    tree.insert(slots(1, 6), slots(20, 6))
    assert tree.evictable == 4
    assert [p.tolist() for p in tree.evict(1)] == [[20, 21, 22, 23]]


def test_a_full_hit_leaves_a_token_to_compute():
    tree = RadixCache(4)
    tree.insert(slots(1, 8), slots(4, 8))
    assert tree.match_prefix(slots(1, 8)[:-1]).slots.tolist() == slots(4, 4)


def test_namespaces_do_not_share():
    tree = RadixCache(2)
    tree.insert([1, 2], [2, 3], "a")
    assert tree.match_prefix([1, 2]).length == 0
    assert tree.match_prefix([1, 2], "a").length == tree.peek([1, 2], "a").length == 2
    tree.reset()
    assert tree.peek([1, 2], "a").length == tree.evictable == 0


def test_peek_sees_what_match_would_find_and_changes_nothing():
    tree = RadixCache(2)
    tree.insert(slots(1, 6), slots(2, 6))
    tree.insert([*slots(1, 2), 9, 9], slots(10, 4))
    node = tree.match_prefix(slots(1, 6)).node
    tree.lock(node)
    before = [(n.used, len(n.key)) for n in tree.walk_nodes()]
    assert tree.peek(slots(1, 4)) == (4, 0)
    assert tree.peek([1, 2, 9, 9, 7, 7]) == (4, 2)
    assert [(n.used, len(n.key)) for n in tree.walk_nodes()] == before


def order(policy, touch):
    tree = RadixCache(1, policy=policy)
    for name, at in (("abc", 10), ("xyz", 20), ("pqr", 30)):
        tree.insert(tokens(name), slots(at, 3))
    touch(tree)
    return [int(p[0]) for p in tree.evict(9)]


def test_the_policies_pick_their_leaf():
    def match_first(tree):
        tree.match_prefix(tokens("abc"))

    def insert_second(tree):
        tree.insert(tokens("xyz"), slots(90, 3))

    assert order("lru", match_first) == [20, 30, 10]
    assert order("fifo", match_first) == [10, 20, 30]
    assert order("lfu", insert_second) == [10, 30, 20]
    assert order("lfu", match_first) == [20, 30, 10]  # a match adds no hit, but it is an access


def test_a_request_does_not_hit_what_it_inserted_itself():
    tree = RadixCache(1, policy="lfu")
    tree.insert(tokens("ab"), slots(1, 2), owner=1)
    tree.insert(tokens("abcd"), slots(1, 4), owner=1)
    assert sorted(n.hits for n in tree.walk_nodes()) == [1, 1]
    tree.insert(tokens("abcd"), slots(50, 4), owner=2)
    assert sorted(n.hits for n in tree.walk_nodes()) == [2, 2]


def test_a_split_copies_hits_and_counts_as_new():
    tree = RadixCache(1, policy="fifo")
    tree.insert(tokens("abcd"), slots(1, 4))
    tree.insert(tokens("xy"), slots(10, 2))
    lower = tree.match_prefix(tokens("abcd")).node
    upper = tree.match_prefix(tokens("ab")).node
    assert (upper.hits, upper.created > lower.created, lower.key.tolist()) == (lower.hits, True, tokens("cd"))
    assert [int(p[0]) for p in tree.evict(99)] == [3, 10, 1]


def test_one_release_has_the_order_of_leaf_by_leaf_releases():
    pieces = [np.array([4, 5, 6, 7, 12, 13]), np.array([8, 9])]
    assert released_pages(pieces, 2, True).tolist() == [4, 2, 3, 6]
    assert released_pages(pieces, 2, False).tolist() == [2, 3, 6, 4]
    assert released_pages([], 2, True).tolist() == []


# Sliding windows and recurrent states: a match is cut to what can be resumed.


def test_an_insert_without_any_live_window_slot_creates_no_node():
    tree = RadixCache(8, window=4)
    assert tree.insert(slots(1, 16), slots(8, 16), swa_evicted=16) == 0
    assert (tree.nodes, tree.evictable, tree.swa_evictable) == (0, 0, 0)


def test_a_window_match_needs_a_whole_live_window():
    tree = RadixCache(4, window=6)
    tree.insert(slots(1, 16), slots(4, 16), swa_evicted=8)
    assert (tree.evictable, tree.swa_evictable) == (16, 8)
    assert tree.match_prefix(slots(1, 16)).length == 16
    assert tree.match_prefix(slots(1, 12) + [99] * 4).length == 0  # 4 live tokens before it, 6 are needed
    assert tree.peek(slots(1, 12) + [99] * 4).length == 0
    node = tree.match_prefix(slots(1, 16)).node
    tree.lock(node)
    assert (tree.evictable, tree.swa_evictable) == (0, 0)
    tree.unlock(node)
    tree.evict(99)
    assert (tree.evictable, tree.swa_evictable, tree.nodes) == (0, 0, 0)


def test_a_recurrent_match_ends_at_a_state():
    tree = RadixCache(2, recurrent=True)
    tree.insert(slots(1, 4), slots(2, 4), state=7)
    tree.insert(slots(1, 8), slots(2, 8), state=8)
    assert tree.match_prefix(slots(1, 8)).length == 8
    assert tree.match_prefix([*slots(1, 6), 0, 0]).length == tree.peek([*slots(1, 6), 0, 0]).length == 4
    assert tree.match_prefix([*slots(1, 2), 0, 0]).length == 0
    tree.insert(slots(1, 4), slots(90, 4), state=9)  # the tree has a state there already
    assert tree.freed_states == [9]
    tree.evict(99)
    assert sorted(tree.freed_states) == [7, 8, 9]


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_use_agrees_with_a_table_of_prefixes(policy, data):
    """Model: a dict from page-aligned prefix to the slots that were inserted first, and the sums over the nodes."""
    ps = data.draw(st.sampled_from([1, 2, 3]))
    tree, table, locks, at = RadixCache(ps, policy=policy), {}, [], 100
    for _ in range(data.draw(st.integers(1, 40))):
        key = data.draw(st.lists(st.integers(0, 1), max_size=9))
        whole = len(key) // ps * ps
        match data.draw(st.sampled_from(["insert", "match", "lock", "unlock", "evict"])):
            case "insert":
                value = slots(at, len(key))
                at += 100
                had = tree.insert(key, value)
                assert had == max(n for n in range(0, whole + 1, ps) if tuple(key[:n]) in table or n == 0)
                for n in range(had + ps, whole + 1, ps):
                    table[tuple(key[:n])] = value[n - ps : n]
            case "match":
                peeked = tree.peek(key).length
                found = tree.match_prefix(key)
                expected = []
                while len(expected) < whole and tuple(key[: len(expected) + ps]) in table:
                    expected += table[tuple(key[: len(expected) + ps])]
                assert found.slots.tolist() == expected
                assert peeked == len(expected)
            case "lock":
                node = tree.match_prefix(key).node
                change = tree.lock(node)
                assert change <= 0
                if node.parent is not None:
                    locks.append(node)
            case "unlock" if locks:
                tree.unlock(locks.pop(data.draw(st.integers(0, len(locks) - 1))))
            case "evict":
                wanted, had = data.draw(st.integers(0, 6)), tree.evictable
                gone = {int(s) for piece in tree.evict(wanted) for s in piece}
                assert min(wanted, had) <= len(gone) <= had
                table = {k: v for k, v in table.items() if not gone & set(v)}
        nodes = list(tree.walk_nodes())
        assert tree.nodes == len(nodes)
        assert tree.evictable == sum(len(n.key) for n in nodes if not n.locks)
        assert tree.protected == sum(len(n.key) for n in nodes if n.locks)
        assert sorted(tree.slots().tolist()) == sorted(s for v in table.values() for s in v)
    while locks:
        tree.unlock(locks.pop())
    assert sum(map(len, tree.evict(10**6))) == len(table) * ps
    assert tree.evictable == tree.protected == 0


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ([2**32 + 7], [1], "does not fit int32"),
        (np.array([7]), np.array([2**32 + 1]), "does not fit int32"),
        ([60.5], [1], "flat sequence of integers"),
        ([[1]], [1], "flat sequence of integers"),
        (["a"], [1], "flat sequence of integers"),
    ],
)
def test_b47_ids_are_never_cut_to_32_bits(key, value, says):
    tree = RadixCache(1)
    with pytest.raises(ValueError, match=says):
        tree.insert(key, value)
    assert tree.nodes == 0


def test_an_evicted_node_can_not_be_locked():
    tree = RadixCache(1)
    tree.insert([1, 2, 3], [1, 2, 3])
    node = tree.match_prefix([1, 2, 3]).node
    tree.evict(3)
    with pytest.raises(ValueError, match="3 tokens is not in the tree any more"):
        tree.lock(node)
