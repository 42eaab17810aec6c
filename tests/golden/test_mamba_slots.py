"""Replay of every mamba_slots trace: slots in order, the free list, the group."""

import pytest

from kvjax.allocators import MambaSlotAllocator
from tests.golden import replay, traces


@pytest.mark.parametrize("path", traces.find("mamba_slots_*"), ids=lambda p: p.name)
def test_mamba_slots_trace(path):
    trace = replay.Trace.load(path, "mamba_slots", {"size"})
    slots = MambaSlotAllocator.create(trace.config["size"])
    capacity = trace.width(lambda op: [op["args"].get("n", 0)])
    width = trace.width(lambda op: [len(op["args"].get("loc", ()))])
    alloc = replay.Once(lambda a, n: a.alloc(n, capacity=capacity))
    begin = replay.Once(lambda a, n: a.alloc_group_begin(n, capacity=capacity))
    end = replay.Once(lambda a: a.alloc_group_end())
    free = replay.Once(lambda a, loc: a.free(loc))

    def step(a, name, args):
        match name, sorted(args):
            case "alloc", ["n"]:
                a, loc, ok = alloc(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "alloc_group_begin", ["n"]:
                a, loc, ok = begin(a, args["n"])
                return a, replay.taken(loc, args["n"], ok), {}
            case "alloc_group_end", []:
                return end(a), None, {}
            case "free", ["loc"]:
                return free(a, replay.pad(args["loc"], width)), None, {}
            case "clear", []:
                return a.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def observe(a):
        free, group = a.to_lists()
        return {"available": int(a.available_size()), "group_left": int(a.group_left), "free": free, "group": group}

    last = replay.run(trace, slots, step, observe)
    assert int(last.faults) == 0
    for compiled in (alloc, begin, end, free):
        compiled.check()
