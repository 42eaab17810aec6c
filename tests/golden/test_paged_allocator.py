"""Replay of every paged_allocator trace: slots in order, free and staged page lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import PagedTokenToKVPoolAllocator, segment_pages
from kvjax.layout import ceil_div
from tests.golden import replay, traces
from tests.golden.test_token_allocator import observe


@pytest.mark.parametrize("path", traces.find("paged_allocator_*"), ids=lambda p: p.name)
def test_paged_allocator_trace(path):
    trace = replay.Trace.load(path, "paged_allocator", {"size", "page_size", "num_pages", "need_sort"})
    ps = trace.config["page_size"]
    allocator = PagedTokenToKVPoolAllocator.create(trace.config["size"], ps, trace.config["need_sort"])
    assert allocator.num_pages == trace.config["num_pages"]

    batch = trace.width(lambda op: [len(op["args"].get("seq_lens", ()))])
    capacity = trace.width(lambda op: [op["args"].get("n", 0), _new_tokens(op["args"])])
    width = trace.width(lambda op: [len(op["args"].get("loc", ())), len(op["args"].get("page_ids", ())) * ps])
    groups = [op["args"]["items"] for op in trace.ops if op["op"] == "free_group"]
    tokens = max((sum(len(i.get("free", ())) for i in g) for g in groups), default=0) or 1
    listed = [[i for i in g if "free" not in i] for g in groups]
    items = max(map(len, listed), default=0) or 1
    pages = max((_pages(i, ps) for g in listed for i in g), default=0) or 1

    alloc = replay.Once(lambda a, n: a.alloc(n, capacity=capacity))
    extend = replay.Once(lambda a, pre, seq, last, n: a.alloc_extend(pre, seq, last, capacity=capacity, num_lanes=n))
    decode = replay.Once(lambda a, seq, last, active: a.alloc_decode(seq, last, active))
    free = replay.Once(lambda a, loc: a.free(loc))
    free_segment = replay.Once(lambda a, loc: a.free_segment(loc, 0))
    free_page_ids = replay.Once(lambda a, ids: a.free_page_ids(ids))

    @replay.Once
    def free_group(a, token_loc, is_segment, segment_loc, ids):
        of_segment = jax.vmap(lambda loc: segment_pages(loc, 0, ps))(segment_loc)
        return a.free_group(token_loc, pages=jnp.where(is_segment[:, None], of_segment, ids).reshape(-1))

    def step(a, name, args):
        match name, sorted(args):
            case "alloc", ["n"]:
                a, loc, ok = alloc(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "alloc_extend", ["last_loc", "prefix_lens", "seq_lens"]:
                pre, seq = replay.pad(args["prefix_lens"], batch), replay.pad(args["seq_lens"], batch)
                a, loc, ok = extend(a, pre, seq, replay.pad(args["last_loc"], batch, -1), len(args["seq_lens"]))
                return a, replay.taken(loc, _new_tokens(args), ok), {}
            case "alloc_decode", ["last_loc", "seq_lens"]:
                n = len(args["seq_lens"])
                seq, last = replay.pad(args["seq_lens"], batch), replay.pad(args["last_loc"], batch, -1)
                a, loc, ok = decode(a, seq, last, replay.lanes(n, batch))
                return a, replay.taken(loc, n, ok), {}
            case "free", ["loc"]:
                return free(a, replay.pad(args["loc"], width)), None, {}
            case "free_segment", ["loc", "start_pos"]:
                assert args["start_pos"] % ps == 0
                return free_segment(a, replay.pad(args["loc"], width)), None, {}
            case "free_page_ids", ["page_ids"]:
                return free_page_ids(a, replay.pad(args["page_ids"], width)), None, {}
            case "free_group", ["items"]:
                return free_group(a, *_group(args["items"])), None, {}
            case "clear", []:
                return a.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def _group(group):
        token_loc = replay.pad([s for i in group for s in i.get("free", ())], tokens)
        is_segment = np.zeros(items, bool)
        segment_loc, ids = np.zeros((items, pages * ps), np.int32), np.zeros((items, pages), np.int32)
        for row, item in enumerate(i for i in group if "free" not in i):
            match sorted(item):
                case ["free_segment", "start_pos"]:
                    assert item["start_pos"] % ps == 0
                    is_segment[row], segment_loc[row] = True, replay.pad(item["free_segment"], pages * ps)
                case ["free_page_ids"]:
                    ids[row] = replay.pad(item["free_page_ids"], pages)
                case other:
                    raise AssertionError(f"unknown group item {other}")
        return token_loc, is_segment, segment_loc, ids

    last = replay.run(trace, allocator, step, observe)
    assert int(last.faults) == 0
    for compiled in (alloc, extend, decode, free, free_segment, free_page_ids, free_group):
        compiled.check()


def _new_tokens(args):
    return sum(args["seq_lens"]) - sum(args["prefix_lens"]) if "prefix_lens" in args else 0


def _pages(item, page_size):
    return len(item.get("free_page_ids", ())) or ceil_div(len(item.get("free_segment", ())), page_size)
