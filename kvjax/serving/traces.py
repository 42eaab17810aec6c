"""Request traces: arrival, tokens in, tokens out, and which blocks of the input others share.

Two formats. Mooncake: JSON lines with timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens).
Azure LLM inference: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.layout import INT32_MAX, ceil_div, positive

BLOCK = 512  # tokens of a hashed block


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One line of a trace."""

    arrival_us: int  # since the first request
    input_len: int  # tokens
    output_len: int  # tokens
    blocks: tuple[int, ...]  # ids of the first whole blocks; the rest of the input is private

    def tokens(self, private_ids: Callable[[int], np.ndarray]) -> np.ndarray:
        """i32[input_len]: block id x 512 + offset, then ids that nobody else has."""
        shared = np.asarray(self.blocks, np.int32)[:, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)
        return np.concatenate([shared.reshape(-1), private_ids(self.input_len - shared.size)]).astype(np.int32)


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests by arrival. limit: only the first ones of the file. ValueError for a line of another format."""
    path = Path(path)
    if limit is not None:
        positive("limit", limit)
    with open(path, encoding="utf-8") as file:
        rows = _mooncake(file) if path.suffix == ".jsonl" else _azure(file)
        found: list[TraceRequest] = []
        try:
            for time_us, given, out, hashes in rows:
                if given < 1 or out < 1:
                    raise ValueError(f"it has {given} tokens in and {out} out; at least one of each was expected")
                found.append(TraceRequest(time_us, given, out, tuple(hashes[: given // BLOCK])))
                if len(found) == limit:
                    break
        except KeyError as error:
            raise ValueError(f"{path}, request {len(found) + 1} has no field {error.args[0]}.") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, request {len(found) + 1} can not be read: {error}.") from None
    if not found:
        raise ValueError(f"{path} holds no request; a Mooncake .jsonl or an Azure .csv was expected.")
    first = min(r.arrival_us for r in found)
    found = [dataclasses.replace(r, arrival_us=r.arrival_us - first) for r in found]
    return sorted(_renumbered(found), key=lambda r: r.arrival_us)


def _renumbered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """The same blocks under small numbers, where id x 512 would not fit a token id."""
    if max((b for r in requests for b in r.blocks), default=0) < INT32_MAX // BLOCK:
        return requests
    number: dict[int, int] = {}
    for r in requests:
        for b in r.blocks:
            number.setdefault(b, len(number))
    return [dataclasses.replace(r, blocks=tuple(number[b] for b in r.blocks)) for r in requests]


def _mooncake(lines: Iterable[str]) -> Iterable[tuple[int, int, int, list[int]]]:
    for line in lines:
        if line.strip():
            row: dict[str, Any] = json.loads(line)
            hashes, given, time = row["hash_ids"], int(row["input_length"]), row["timestamp"]
            if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < 2**53:
                raise ValueError(f"its timestamp is {str(time)[:20]!r}; milliseconds as a number were expected")
            if len(hashes) < given // BLOCK or any(not isinstance(h, int) or h < 0 for h in hashes):
                raise ValueError(
                    f"it has {len(hashes)} hash_ids for {given} tokens; {ceil_div(given, BLOCK)} numbers of 0 or more "
                    "were expected"
                )
            yield int(time * 1000), given, int(row["output_length"]), hashes


def _azure(lines: Iterable[str]) -> Iterable[tuple[int, int, int, list[int]]]:
    for row in csv.DictReader(lines):
        # Seven decimals are more than datetime reads; they are tenths of a microsecond.
        stamp, _, fraction = row["TIMESTAMP"].partition(".")
        time = datetime.fromisoformat(stamp).replace(tzinfo=None) - datetime(1970, 1, 1)
        micros = int(fraction[:6].ljust(6, "0")) if fraction else 0
        seconds = time.days * 86_400 + time.seconds
        yield seconds * 1_000_000 + micros, int(row["ContextTokens"]), int(row["GeneratedTokens"]), []
