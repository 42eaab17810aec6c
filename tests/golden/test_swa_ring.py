"""Replay of every swa_ring trace: pages on the full side, capacity of the rings counted in free rows."""

import dataclasses

import numpy as np
import pytest

from kvjax import ReqToTokenPool
from kvjax.allocators import SWARingTokenToKVPoolAllocator
from kvjax.layout import ceil_div
from kvjax.operation import state
from tests.golden import replay, traces
from tests.golden.test_swa_allocator import Operations

CONFIG = {"size_full", "page_size", "rows", "ring_size", "ring_cost", "size_swa", "size", "need_sort"}


@state
class Ring:
    """What a trace is about: the allocator and the rows that own the rings."""

    allocator: SWARingTokenToKVPoolAllocator
    table: ReqToTokenPool


@pytest.mark.parametrize("path", traces.find("swa_ring_*"), ids=lambda p: p.name)
def test_swa_ring_trace(path):
    trace = replay.Trace.load(path, "swa_ring", CONFIG)
    size, ps, rows, window, need_sort = (
        trace.config[k] for k in ("size_full", "page_size", "rows", "ring_size", "need_sort")
    )
    allocator = SWARingTokenToKVPoolAllocator.create(size, ps, rows, window, need_sort=need_sort)
    assert allocator.ring == trace.config["ring_cost"] == ceil_div(window, ps) * ps
    assert allocator.size_swa == trace.config["size_swa"]
    assert allocator.size == trace.config["size"]

    operations = Operations(trace, ps)
    lanes = trace.width(lambda op: [op["args"].get("n", 0), len(op["args"].get("rows", ()))])
    alloc_rows = replay.Once(lambda table, want: table.alloc_rows(want))
    free_rows = replay.Once(lambda table, ids: table.free_rows(ids))

    def step(ring, name, args):
        match name, sorted(args):
            case "alloc_rows", ["n"]:
                table, taken, ok = alloc_rows(ring.table, replay.lanes(args["n"], lanes))
                return dataclasses.replace(ring, table=table), replay.taken(taken, args["n"], ok), {}
            case "free_rows", ["rows"]:
                table = free_rows(ring.table, replay.pad(args["rows"], lanes))
                return dataclasses.replace(ring, table=table), None, {}
        allocator, result, extras = operations.step(ring.allocator, name, args)
        return dataclasses.replace(ring, allocator=allocator), result, extras

    last = replay.run(trace, Ring(allocator, ReqToTokenPool.create(rows, 8)), step, observe)
    assert int(last.allocator.faults) == int(last.table.faults) == 0
    operations.assert_compiled_once()
    alloc_rows.check()
    free_rows.check()


def observe(ring):
    a, slots = ring.allocator, np.arange(ring.allocator.size_full + ring.allocator.page_size, dtype=np.int32)
    free, staged = a.full_attn_allocator.to_lists()
    return {
        "available": int(a.available_size()),
        "full_available": int(a.full_available_size()),
        "swa_available": int(a.swa_available_size(ring.table.available_size())),
        "full_free": free,
        "full_staged": staged,
        "free_rows": ring.table.to_list(),
        "mapping_max": int(a.translate(slots).max()),
    }
