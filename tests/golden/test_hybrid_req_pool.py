"""Replay of every hybrid_req_pool trace: rows, working and tracking slots, both slot tables, the free lists."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import dataclasses

import numpy as np
import pytest

from kvjax.rows import HybridReqToTokenPool
from kvjax.rows.hybrid import LAST, NEXT
from tests.golden import replay, traces

CONFIG = {
    "rows", "mamba_slots", "variant", "extra_buffer", "lazy", "overlap", "tracking_width", "initial_tracking_slots"
}  # fmt: skip
EXTRAS = frozenset({"working", "tracking", "empty", "next_track", "last_track"})


@pytest.mark.parametrize("path", traces.find("hybrid_req_pool_*"), ids=lambda p: p.name)
def test_hybrid_req_pool_trace(path):
    trace = replay.Trace.load(path, "hybrid_req_pool", CONFIG)
    config = trace.config
    pool = HybridReqToTokenPool.create(
        config["rows"], 8, config["mamba_slots"], config["extra_buffer"], config["overlap"], config["lazy"]
    )
    width, tracks = config["tracking_width"], config["extra_buffer"]
    assert (pool.tracking_width, pool.initial_tracking) == (width, config["initial_tracking_slots"])
    batch = trace.width(lambda op: [len(op["args"].get(k, ())) for k in ("rows_in", "rows", "loc")])
    capacity = trace.width(lambda op: [op["args"].get("n", 0)])

    recorded = {id(op["args"]): op for op in trace.ops}
    alloc = replay.Once(lambda p, rows, working, tracking, has: p.alloc(rows, working, tracking, has))
    free_rows = replay.Once(lambda p, rows: p.free_rows(rows))
    free_mamba = replay.Once(lambda p, row, keep: p.free_mamba(row, keep))
    set_track = replay.Once(lambda p, row, idx, value: p.set_track(row, idx, value))
    donate = replay.Once(lambda p, row, idx, new: p.donate(row, idx, new))
    slot_alloc = replay.Once(lambda p, n: _with_slots(p, p.slots.alloc(n, capacity=capacity)))
    slot_free = replay.Once(lambda p, loc: dataclasses.replace(p, slots=p.slots.free(loc)))

    def step(pool, name, args):
        match name, sorted(args):
            case "alloc", ["rows_in", "working_in"] if not tracks:
                none = np.zeros((batch, 0), np.int32), np.zeros(batch, bool)
                rows, working = (replay.pad(args[k], batch) for k in ("rows_in", "working_in"))
                pool, rows, working, _, ok = alloc(pool, rows, working, *none)
                count = len(args["rows_in"])
                return pool, replay.taken(rows, count, ok), {"working": replay.taken(working, count, ok)}
            case "alloc", ["has_tracking", "rows_in", "tracking_in", "working_in"] if tracks:
                pool = _as_the_driver_left_them(pool, recorded[id(args)])
                rows, working = (replay.pad(args[k], batch) for k in ("rows_in", "working_in"))
                count, tracking = len(args["rows_in"]), np.zeros((batch, width), np.int32)
                tracking[:count] = args["tracking_in"]
                has = replay.pad(args["has_tracking"], batch).astype(bool)
                pool, rows, working, tracking, ok = alloc(pool, rows, working, tracking, has)
                assert not np.asarray(tracking)[count if ok else 0 :].any()
                entries = np.asarray(tracking)[:count]
                seen = {
                    "working": replay.taken(working, count, ok),
                    "tracking": entries.tolist(),
                    "empty": (entries == -1).tolist(),
                    "next_track": np.asarray(pool.next_track(rows))[:count].tolist(),
                    "last_track": np.asarray(pool.last_track(rows))[:count].tolist(),
                }
                return pool, replay.taken(rows, count, ok), seen
            case "free_mamba", ["row", "working"] if not tracks:
                assert int(pool.working[args["row"]]) == args["working"]
                return free_mamba(pool, np.array([args["row"]], np.int32), np.array([-1], np.int32)), None, {}
            case "free_mamba", ["empty", "keep", "row", "tracking", "working"] if tracks:
                assert int(pool.working[args["row"]]) == args["working"]
                held = np.asarray(pool.tracking[args["row"]])
                assert (held.tolist(), (held == -1).tolist()) == (args["tracking"], args["empty"])
                row, keep = (np.array([args[k]], np.int32) for k in ("row", "keep"))
                return free_mamba(pool, row, keep), None, {}
            case "free_rows", ["rows"]:
                return free_rows(pool, replay.pad(args["rows"], batch)), None, {}
            case "set_track", ["idx", "row", "value"]:
                row, idx, value = (np.array([args[k]], np.int32) for k in ("row", "idx", "value"))
                pool, entries, ok = set_track(pool, row, idx, value)
                assert ok
                return pool, entries[0].tolist(), {"last_track": int(pool.last_track(row)[0])}
            case "donate", ["keep_idx", "new_slot", "row"]:
                row, idx, new = (np.array([args[k]], np.int32) for k in ("row", "keep_idx", "new_slot"))
                pool, given, ok = donate(pool, row, idx, new)
                assert ok
                return pool, given.tolist(), {"tracking": pool.tracking[args["row"]].tolist()}
            case "slot_alloc", ["n"]:
                pool, slots, ok = slot_alloc(pool, args["n"])
                return pool, replay.taken(slots, args["n"], ok), {}
            case "slot_free", ["loc"]:
                return slot_free(pool, replay.pad(args["loc"], batch)), None, {}
            case "clear", []:
                return pool.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def observe(pool):
        seen = {
            "available_rows": int(pool.table.available_size()),
            "available_slots": int(pool.slots.available_size()),
            "free_rows": pool.table.to_list(),
            "generation": pool.generation.tolist(),
            "free_slots": pool.slots.to_lists()[0],
            "working": pool.working.tolist(),
        }
        return seen | ({"tracking": pool.tracking.tolist()} if tracks else {})

    last = replay.run(trace, pool, step, observe, EXTRAS)
    assert int(last.faults) == 0
    for compiled in (alloc, free_rows, free_mamba, set_track, donate, slot_alloc, slot_free):
        compiled.check()


def _with_slots(pool, result):
    slots, loc, ok = result
    return dataclasses.replace(pool, slots=slots), loc, ok


def _as_the_driver_left_them(pool, op):
    """Requests of the recording moved their own next and last between calls; alloc passes a held lane's through."""
    cursor = pool.cursor
    for lane, row in enumerate(op["args"]["rows_in"]):
        if row > 0 and op["result"] is not None:
            cursor = cursor.at[row, NEXT].set(op["next_track"][lane]).at[row, LAST].set(op["last_track"][lane])
    return dataclasses.replace(pool, cursor=cursor)
