"""Replay of every req_to_token trace: rows, generations, table."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import ReqToTokenPool
from tests.golden import replay, traces


@pytest.mark.parametrize("path", traces.find("req_to_token_*"), ids=lambda p: p.name)
def test_req_to_token_trace(path):
    trace = replay.Trace.load(path, "req_to_token", {"size", "max_context_len"})
    pool = ReqToTokenPool.create(trace.config["size"], trace.config["max_context_len"])
    batch = trace.width(lambda op: [op["args"].get("n", 0), *(len(op["args"].get(k, ())) for k in ("rows", "rows_in"))])
    values = trace.width(lambda op: [len(op["args"].get("values", ()))])

    alloc_rows = replay.Once(lambda pool, want: pool.alloc_rows(want))
    free_rows = replay.Once(lambda pool, rows: pool.free_rows(rows))

    @replay.Once
    def write(pool, row, start, values, count):
        lane = jnp.arange(values.shape[0], dtype=jnp.int32)
        out = pool.write(row[None], (start + lane)[None], values[None], (lane < count)[None])
        return out, out.req_to_token[row]

    def step(pool, name, args):
        match name, sorted(args):
            case "alloc_rows", ["n"]:
                pool, rows, ok = alloc_rows(pool, replay.lanes(args["n"], batch))
                return pool, replay.taken(rows, args["n"], ok), {}
            case "alloc", ["rows_in"]:
                wanted = replay.pad(args["rows_in"], batch)
                pool, rows, ok = alloc_rows(pool, wanted == -1)
                merged = np.where(wanted == -1, np.asarray(rows), wanted)[: len(args["rows_in"])]
                return pool, merged.tolist() if ok else None, {}
            case "free_rows", ["rows"]:
                return free_rows(pool, replay.pad(args["rows"], batch)), None, {}
            case "write", ["row", "start", "values"]:
                row, start = np.int32(args["row"]), np.int32(args["start"])
                pool, after = write(pool, row, start, replay.pad(args["values"], values), len(args["values"]))
                return pool, None, {"row_values": after.tolist()}
            case "clear", []:
                return pool.clear(), None, {}
        raise AssertionError(f"unknown operation {name} with {sorted(args)}")

    def observe(pool):
        return {
            "available": int(pool.available_size()),
            "free": pool.to_list(),
            "generation": pool.generation.tolist(),
        }

    last = replay.run(trace, pool, step, observe, frozenset({"row_values"}))
    assert int(last.faults) == 0
    for compiled in (alloc_rows, free_rows, write):
        compiled.check()
