"""What goes into the two programs and what comes out: lanes of requests in, one packed vector of numbers out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.operation import state
from models.sampling import SamplingParams


@state
class Chunk:
    """One extend program's input: up to t prompt tokens for each of b lanes. A lane not in use is all zeros."""

    tokens: jax.Array  # i32[b, t], the chunk, from the left; behind it anything
    rows: jax.Array  # i32[b], > 0: the request's row; -1: a new row is wanted; 0: not in use
    prefix_lens: jax.Array  # i32[b], tokens that the row holds already
    seq_lens: jax.Array  # i32[b], tokens that it will hold after the chunk
    final: jax.Array  # bool[b], the prompt ends in this chunk: draw the first token of the answer
    generated: jax.Array  # i32[b], answer tokens so far (part of the prompt again, after a retraction)
    limit: jax.Array  # i32[b], answer tokens wanted in all
    ends: jax.Array  # bool[b], an end-of-sequence token finishes the request
    sampling: SamplingParams

    @classmethod
    def empty(cls, lanes: int, width: int) -> Chunk:
        """A chunk on the host in which no lane is in use, to be filled in."""
        number, flag = _columns(lanes)
        tokens: Any = np.zeros((lanes, width), np.int32)
        return cls(tokens, number(), number(), number(), flag(), number(), number(), flag(), _empty_sampling(lanes))


@state
class Lanes:
    """One decode program's input: the running requests. A lane not in use has row 0 and is not active."""

    rows: jax.Array  # i32[b]
    tokens: jax.Array  # i32[b], the last token of each answer, which the next step feeds
    active: jax.Array  # bool[b]
    generated: jax.Array  # i32[b], answer tokens so far, the one that prefill drew included
    limit: jax.Array  # i32[b], answer tokens wanted in all
    ends: jax.Array  # bool[b], an end-of-sequence token finishes the request
    sampling: SamplingParams

    @classmethod
    def empty(cls, lanes: int) -> Lanes:
        """Lanes on the host of which none is in use, to be filled in."""
        number, flag = _columns(lanes)
        return cls(number(), number(), flag(), number(), number(), flag(), _empty_sampling(lanes))


def _columns(lanes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Makers of i32[lanes] and bool[lanes] zeros on the host."""
    return (lambda: np.zeros(lanes, np.int32)), (lambda: np.zeros(lanes, np.bool_))


def _empty_sampling(lanes: int) -> SamplingParams:
    number, _ = _columns(lanes)
    temperature: Any = np.zeros(lanes, np.float32)
    top_p: Any = np.ones(lanes, np.float32)
    return SamplingParams(temperature=temperature, top_k=number(), top_p=top_p, seed=number())


@dataclasses.dataclass(frozen=True)
class Report:
    """What every program tells the host, as one i32 vector, so that one transfer fetches all of it.

    The vector holds the fields in the order in which they stand here: numbers, then columns of b lanes, then tokens.
    Inside a program the fields are traced arrays (`pack`), on the host Python ints and numpy arrays (`unpack`).
    """

    free_pages: Any  # i32[], pages that can be handed out at once
    staged_pages: Any  # i32[], freed pages that wait for a merge
    free_rows: Any  # i32[], rows that can be handed out
    ok: Any  # i32[], 0: the last step (of decode) or the whole program could not be served, and changed nothing
    faults: Any  # i32[], releases refused since the ledger was made; always 0 in a sound program
    steps: Any  # i32[], forward passes run
    fewest_free: Any  # i32[], fewest free and staged pages at any time during the program
    rows: Any  # i32[b], row of each lane; 0 where it was given back
    lengths: Any  # i32[b], tokens in each lane's row, or what it held when it was given back
    finished: Any  # i32[b], 1: the request ended in this program (its row is free again, or parked)
    waiting: Any  # i32[b], 1: the lane's next token needs a page and there was none (ok == 0)
    produced: Any  # i32[b], tokens drawn for the lane
    tokens: Any  # i32[b, k], the first produced[i] of lane i are real

    @staticmethod
    def shapes(lanes: int, width: int) -> dict[str, tuple[int, ...]]:
        """Shape of every field for b lanes and k tokens per lane, in packed order."""
        names = [field.name for field in dataclasses.fields(Report)]
        columns = names.index("rows")
        shapes = dict.fromkeys(names[:columns], ()) | dict.fromkeys(names[columns:], (lanes,))
        return shapes | {"tokens": (lanes, width)}

    def pack(self) -> jax.Array:
        """i32[n]: all fields, one behind the other."""
        parts = [jnp.asarray(getattr(self, f.name)).astype(jnp.int32).reshape(-1) for f in dataclasses.fields(self)]
        return jnp.concatenate(parts)

    @classmethod
    def unpack(cls, vector: np.ndarray | jax.Array, lanes: int, width: int) -> Report:
        """The report of a fetched vector. ValueError if its length does not fit."""
        values, fields, start = np.asarray(vector), {}, 0
        shapes = cls.shapes(lanes, width)
        expected = sum(math.prod(shape) for shape in shapes.values())
        if values.shape != (expected,):
            raise ValueError(
                f"a report of {lanes} lanes and {width} tokens each has {expected} numbers, but the vector has shape "
                f"{values.shape}; unpack it with the sizes of the program that made it."
            )
        for name, shape in shapes.items():
            part = values[start : start + math.prod(shape)]
            fields[name] = part.reshape(shape) if shape else int(part[0])
            start += part.size
        return cls(**fields)
