"""Replay of every radix trace: the tree on the host, the real allocator on the device, evictions as one release."""

import jax
import pytest

from kvjax import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvjax.prefix import RadixCache, released_pages
from tests.golden import replay, traces


@pytest.mark.parametrize("path", traces.find("radix_*"), ids=lambda p: p.name)
def test_radix_trace(path):
    trace = replay.Trace.load(path, "radix", {"pages", "page_size", "size", "need_sort", "policy"})
    config, ps = trace.config, trace.config["page_size"]
    assert config["size"] == config["pages"] * ps
    if ps == 1:
        allocator = TokenToKVPoolAllocator.create(config["size"], config["need_sort"])
    else:
        allocator = PagedTokenToKVPoolAllocator.create(config["size"], ps, config["need_sort"])
    assert allocator.num_pages == config["pages"]
    to_front = ps > 1 and not config["need_sort"]
    tree = RadixCache(ps, policy=config["policy"])
    locked = {}

    capacity = trace.width(lambda op: [op["args"].get("n", 0) if op["op"] == "alloc" else 0])
    width = trace.width(lambda op: [len(op["args"].get("loc", ())), len(op["result"] or ())])
    alloc = jax.jit(lambda a, n: a.alloc(n, capacity=capacity))
    free_segment = jax.jit(lambda a, loc: a.free_segment(loc, 0))
    free_page_ids = jax.jit(lambda a, pages: a.free_page_ids(pages))

    def step(a, name, args):
        match name, sorted(args):
            case "match_prefix", ["extra_key", "key"]:
                return a, tree.match_prefix(args["key"], args["extra_key"]).slots.tolist(), {}
            case "insert", ["extra_key", "key", "value"]:
                return a, [tree.insert(args["key"], args["value"], args["extra_key"])], {}
            case "lock", ["extra_key", "handle", "key"]:
                node = tree.match_prefix(args["key"], args["extra_key"]).node
                assert args["handle"] not in locked
                locked[args["handle"]] = node
                return a, [tree.lock(node)], {}
            case "unlock", ["handle"]:
                return a, [tree.unlock(locked.pop(args["handle"]))], {}
            case "evict", ["n"]:
                pieces = tree.evict(args["n"])
                a = free_page_ids(a, replay.pad(released_pages(pieces, ps, to_front).tolist(), width))
                slots = [s for piece in pieces for s in piece.tolist()]
                return a, slots, {"evicted": len(slots), "pieces": [len(p) for p in pieces]}
            case "alloc", ["n"]:
                a, loc, ok = alloc(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "free_segment", ["loc", "start_pos"]:
                assert args["start_pos"] % ps == 0
                return free_segment(a, replay.pad(args["loc"], width)), None, {}
            case "reset", []:
                tree.reset()
                return a.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def observe(a):
        return {
            "evictable": tree.evictable,
            "protected": tree.protected,
            "available": int(a.available_size()),
            "nodes": tree.nodes,
            "free": a.to_lists()[0],
        }

    last = replay.run(trace, allocator, step, observe, extras=frozenset({"evicted", "pieces"}))
    assert int(last.faults) == 0
    assert sum(len(node.key) for node in tree.walk_nodes()) == tree.evictable + tree.protected
