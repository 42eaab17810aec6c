"""Named shapes of paged attention, pools that are NaN wherever nobody may read, and a dense float64 oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.options import Config

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Times sqrt(head_dim), the length of a score's sum: rounding of the factors, of the weights and of the result.
TOLERANCE = {F32: 4e-7, BF16: 2e-3, F16: 2.5e-4}
TABLE_PADDING = (0, -1, 2**31 - 1, -(2**31))  # what stands behind a row's end: anything
SMALL = Config(16, 16, 2)  # several turns and two splits at these lengths


@dataclasses.dataclass(frozen=True)
class Case:
    """heads and sizes are the model's; batch and lengths are small, for the interpreters."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    page: int = 16
    lens: tuple[int, ...] = (45, 16, 0, 1)
    q_lens: tuple[int, ...] | None = None  # None: decode
    compute: type = F32  # of queries and results
    dtype: type = F32  # of keys and values
    words: bool = False  # stored as unsigned integers
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    traced_scales: bool = False
    rank: int | None = None
    width: int | None = None  # stored columns of a latent
    config: Config | None = SMALL

    @property
    def operation(self) -> str:
        if self.q_lens is not None:
            return "paged_extend"
        return "paged_decode_gqa" if self.rank is None else "paged_decode_mla"

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.compute] * self.dim**0.5


def latent(heads: int, rank: int, rope: int, **kwargs) -> Case:
    return Case(heads, 1, rank + rope, rank, rank=rank, **kwargs)


CASES = {
    "Llama-3-8B": Case(32, 8, 128, 128, lens=(21, 0, 16), compute=BF16, dtype=BF16, words=True),
    "Qwen3-32B, fp8": Case(
        *(64, 8, 128, 128), page=64, lens=(70, 0), compute=BF16, dtype=E4M3, words=True, k_scale=0.03, v_scale=0.3
    ),
    "SmolLM2": Case(9, 3, 64, 64, config=Config(16, 16, 3)),
    "SmolLM2, one program": Case(9, 3, 64, 64, config=None),
    "gpt-oss window layer": Case(16, 2, 64, 64, window=20, sinks=True, compute=BF16, dtype=BF16),
    "Gemma-3 window layer": Case(4, 2, 256, 256, window=7, softcap=2.0, config=Config(16, 16, 1)),
    "MHA 80 / 64, pages of 3": Case(5, 5, 80, 64, page=3, compute=F16, dtype=F16, config=Config(16, 16, 1)),
    "MQA 96 / 24, pages of 1": Case(
        *(6, 1, 96, 24), page=1, dtype=E5M2, words=True, k_scale=0.02, v_scale=0.5, traced_scales=True, sinks=True
    ),
    "pages of 128": Case(4, 2, 64, 64, page=128, lens=(130, 127, 0, 128), config=Config(16, 64, 2)),
    "DeepSeek-V3": latent(
        *(128, 512, 64), page=64, lens=(37, 0, 64), compute=BF16, dtype=BF16, config=Config(64, 32, 1, 8)
    ),
    "DeepSeek-V2-Lite": latent(
        16,
        512,
        64,
        lens=(45, 0, 33),
    ),
    "latents 40 + 8 of 64": latent(24, 40, 8, page=3, width=64, softcap=1.5, sinks=True),
    "latents without rope": latent(3, 16, 0, page=1, config=None),
    "Llama-3-8B chunk": Case(8, 2, 128, 128, lens=(21, 9, 0), q_lens=(9, 2, 0), compute=BF16, dtype=BF16),
    "SmolLM2 drafts": Case(9, 3, 64, 64, q_lens=(3, 2, 0, 1)),
    "window chunk": Case(*(4, 2, 16, 16), page=4, q_lens=(12, 7, 0, 1), window=5, sinks=True, softcap=2.0, words=True),
    "latent chunk": latent(16, 64, 16, q_lens=(5, 5, 0, 1), config=Config(32, 16, 1)),
}


@dataclasses.dataclass
class Made:
    """The arrays of a case; `kv` is what the rows hold, in float64, by lane."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray | None
    table: np.ndarray
    rows: np.ndarray
    lens: np.ndarray
    positions: np.ndarray | None
    sinks: np.ndarray | None
    kv: list[tuple[np.ndarray, np.ndarray]]


def make(case: Case, seed: int = 0, poison: float = np.nan) -> Made:
    """Random arrays; every slot that no row holds is `poison`, page 0 first."""
    rng = np.random.default_rng(seed)
    lanes, columns = len(case.lens), max(case.lens) + 5
    pages = -(-columns // case.page)
    order = rng.permutation(lanes * pages) + 1  # page 0 is padding
    rows = rng.permutation(lanes) + 1
    holds = []
    table = rng.choice(np.array(TABLE_PADDING, np.int32), (lanes + 1, columns))
    slots = (lanes * pages + 1) * case.page
    k = np.full((slots, case.kv_heads, case.width or case.dim), poison, np.float32)
    v = np.full((slots, case.kv_heads, case.v_dim), poison, np.float32)
    for lane, length in enumerate(case.lens):
        mine = order[lane * pages : (lane + 1) * pages, None] * case.page + np.arange(case.page)
        held = mine.reshape(-1)[:length]
        holds.append(held)
        table[rows[lane], :length] = held
        k[held] = rng.normal(0, 1 / (case.k_scale or 1), (length, *k.shape[1:]))
        v[held] = rng.normal(0, 1 / (case.v_scale or 1), (length, *v.shape[1:]))
        if case.window is not None:  # what no query sees any more: the slots may be another's, the entries anything
            gone = max(0, length - (1 if case.q_lens is None else case.q_lens[lane]) - case.window + 1)
            k[held[:gone]] = v[held[:gone]] = poison
            if lane % 2:
                table[rows[lane], :gone] = rng.choice(np.array(TABLE_PADDING, np.int32), gone)
    k, v = (np.asarray(jnp.asarray(x).astype(case.dtype)) for x in (k, v))
    wide = [(k[h].astype(np.float64)[..., : case.dim], v[h].astype(np.float64)) for h in holds]
    if case.rank is not None:
        wide = [(keys, keys[..., : case.rank]) for keys, _ in wide]
    if case.words:
        k, v = (x.view(WORDS[x.dtype.itemsize]) for x in (k, v))
    width = 1 if case.q_lens is None else max(case.q_lens)
    q = np.asarray(jnp.asarray(rng.normal(size=(lanes, width, case.heads, case.dim))).astype(case.compute))
    positions = None
    if case.q_lens is None:
        q = q[:, 0]
    else:
        positions = np.zeros((lanes, width), np.int32)
        for lane, (length, new) in enumerate(zip(case.lens, case.q_lens, strict=True)):
            positions[lane, :new] = np.arange(length - new, length)
    sinks = rng.normal(size=case.heads).astype(np.float32) if case.sinks else None
    lens = np.array(case.lens, np.int32)
    rows = np.where(lens > 0, rows, 0).astype(np.int32)
    v = None if case.rank is not None else v
    return Made(q, k, v, table, rows, lens, positions, sinks, wide)


def arguments(case: Case, made: Made) -> tuple[tuple, dict]:
    """Arguments of the case's operation, without those that choose an implementation."""
    scales = case.k_scale, case.v_scale
    if case.traced_scales:
        scales = tuple(jnp.float32(s) for s in scales)
    static = {
        **{"scale": case.dim**-0.5, "dtype": jnp.dtype(case.dtype), "k_scale": scales[0], "v_scale": scales[1]},
        **{"window": case.window, "softcap": case.softcap, "config": case.config, "sinks": made.sinks},
        "precision": "highest" if case.compute is F32 else None,
    }
    where = (made.table, made.rows)
    if case.operation == "paged_extend":
        return (made.q, made.k, made.v, *where, made.positions, made.lens), static | {"rank": case.rank}
    if case.rank is not None:
        return (made.q, made.k, *where, made.lens), static | {"rank": case.rank}
    return (made.q, made.k, made.v, *where, made.lens), static


def oracle(case: Case, made: Made) -> list[np.ndarray]:
    """f64[queries, heads, v_dim] of each lane's real queries."""
    out = []
    q = made.q.astype(np.float64) if case.q_lens is not None else made.q.astype(np.float64)[:, None]
    new = case.q_lens or tuple(min(1, length) for length in case.lens)
    group = case.heads // case.kv_heads
    for lane, length in enumerate(case.lens):
        k, v = (np.repeat(x, group, axis=1) for x in made.kv[lane])
        k, v = k * (case.k_scale or 1), v * (case.v_scale or 1)
        answers = []
        for i in range(new[lane]):
            position = length - new[lane] + i
            first = 0 if case.window is None else max(0, position - case.window + 1)
            scores = np.einsum("hd,shd->hs", q[lane, i], k[first : position + 1]) * case.dim**-0.5
            if case.softcap is not None:
                scores = case.softcap * np.tanh(scores / case.softcap)
            sink = np.full(case.heads, -np.inf) if made.sinks is None else made.sinks.astype(np.float64)
            best = np.maximum(scores.max(1), sink)
            probs = np.exp(scores - best[:, None])
            whole = probs.sum(1) + np.exp(sink - best)
            answers.append(np.einsum("hs,shv->hv", probs, v[first : position + 1]) / whole[:, None])
        out.append(np.array(answers).reshape(new[lane], case.heads, case.v_dim))
    return out


def check(case: Case, made: Made, out: np.ndarray) -> None:
    """AssertionError unless `out` is what the oracle says: within rounding, 0 on lanes not in use, finite anywhere."""
    assert out.dtype == case.compute
    out = np.asarray(out, np.float64) if case.q_lens is not None else np.asarray(out, np.float64)[:, None]
    assert np.isfinite(out).all()
    for lane, want in enumerate(oracle(case, made)):
        if case.lens[lane] == 0:
            assert not out[lane].any()
        np.testing.assert_allclose(out[lane, : len(want)], want, rtol=0, atol=case.tolerance)
