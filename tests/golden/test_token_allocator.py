"""Replay of every token_allocator trace: slots in order, free and staged lists."""

import pytest

from kvjax import TokenToKVPoolAllocator
from tests.golden import replay, traces


@pytest.mark.parametrize("path", traces.find("token_allocator_*"), ids=lambda p: p.name)
def test_token_allocator_trace(path):
    trace = replay.Trace.load(path, "token_allocator", {"size", "page_size", "need_sort"})
    assert trace.config["page_size"] == 1
    allocator = TokenToKVPoolAllocator.create(trace.config["size"], trace.config["need_sort"])
    capacity = trace.width(lambda op: [op["args"].get("n", 0)])
    width = trace.width(
        lambda op: [len(op["args"].get("loc", ())), sum(len(_slots(i)) for i in op["args"].get("items", ()))]
    )
    alloc = replay.Once(lambda a, n: a.alloc(n, capacity=capacity))
    free = replay.Once(lambda a, loc: a.free(loc))
    free_segment = replay.Once(lambda a, loc: a.free_segment(loc))
    free_group = replay.Once(lambda a, loc: a.free_group(loc))

    def step(a, name, args):
        match name, sorted(args):
            case "alloc", ["n"]:
                a, loc, ok = alloc(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "free", ["loc"]:
                return free(a, replay.pad(args["loc"], width)), None, {}
            case "free_segment", ["loc", "start_pos"]:
                return free_segment(a, replay.pad(args["loc"], width)), None, {}
            case "free_group", ["items"]:
                slots = [s for item in args["items"] for s in _slots(item)]
                return free_group(a, replay.pad(slots, width)), None, {}
            case "clear", []:
                return a.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    last = replay.run(trace, allocator, step, observe)
    assert int(last.faults) == 0
    for compiled in (alloc, free, free_segment, free_group):
        compiled.check()


def _slots(item):
    """Slots of one group item: at page size 1 page ids and segments are slots too."""
    match sorted(item):
        case ["free"]:
            return item["free"]
        case ["free_page_ids"]:
            return item["free_page_ids"]
        case ["free_segment", "start_pos"]:
            return item["free_segment"]
    raise AssertionError(f"unknown group item {sorted(item)}")


def observe(allocator):
    free, staged = allocator.to_lists()
    return {"available": int(allocator.available_size()), "free": free, "staged": staged}
