"""A reader for the text of a compiled program (optimised HLO), as far as `report` needs it.

It knows shapes with layouts and tuples, operands with or without their shape, computations that instructions
call, and nothing about what an opcode means.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = re.compile(r"[a-z]+(\d+)")  # the width in s32, bf16, f8e4m3fn, c64, u4
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_COMPUTATION = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*)?\{\s*$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPEN, _CLOSE = "({[", ")}]"


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array in a program."""

    dtype: str  # HLO's name: s32, bf16, f8e4m3fn, pred
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without padding of a layout."""
        if self.dtype in ("token", "opaque"):
            return 0
        match = _BITS.match(self.dtype)
        bits = 8 if match is None else int(match[1])
        return (math.prod(self.dims) * bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]  # one; for a tuple all its arrays, flattened
    operands: tuple[str, ...]  # names; for a parameter its number, for a constant its text
    called: tuple[tuple[str, str], ...]  # (attribute, computation): ("body", "region_0.1")
    attributes: str  # the rest of the line
    is_root: bool

    def callees(self, *attributes: str) -> tuple[str, ...]:
        """The computations called through one of `attributes`, through any when none is named."""
        return tuple(c for a, c in self.called if not attributes or a in attributes)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: str

    def __getitem__(self, name: str) -> Computation:
        return self.computations[name]


def parse(text: str) -> Module:
    """Read a program. Raises ValueError, with the line, for text that is not HLO."""
    computations: dict[str, Computation] = {}
    entry, name, body = None, None, []
    for line in _joined(text):
        if name is None:
            match = _COMPUTATION.match(line)
            if match and not line.lstrip().startswith("HloModule"):
                name, body = match[2], []
                entry = name if match[1] else entry
        elif line.strip().split(",")[0].startswith("}"):
            if not body:
                raise ValueError(f"computation {name} has no instructions")
            computations[name], name = Computation(name, tuple(body)), None
        elif line.strip():
            body.append(_instruction(line))
    if name is not None or entry is None:
        raise ValueError("not a whole HLO program: " + (f"{name} does not end" if name else "it has no ENTRY"))
    return Module(computations, entry)


def _joined(text: str) -> Iterator[str]:
    """The lines, without /*index=5*/ marks; a constant printed over several lines becomes one."""
    pending = ""
    for line in re.sub(r"/\*index=\d+\*/\s?", "", text).splitlines():
        pending = f"{pending} {line.strip()}" if pending else line
        if _INSTRUCTION.match(pending) and _depth(pending) > 0:
            continue
        yield pending
        pending = ""
    if pending:
        yield pending


def _depth(line: str) -> int:
    bare = _QUOTED.sub("", line)
    return sum(bare.count(c) for c in _OPEN) - sum(bare.count(c) for c in _CLOSE)


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if match is None:
        raise ValueError(f"not an HLO instruction: {line.strip()[:200]!r}")
    rest = match[3]
    shape_end = _matching(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, shape_end) if shape_end > 0 else None
    if opcode is None:
        raise ValueError(f"no opcode in the HLO instruction {line.strip()[:200]!r}")
    close = _matching(rest, opcode.end() - 1)
    attributes = rest[close + 1 :].lstrip(", ")
    inside = rest[opcode.end() : close]
    plain = opcode[1] in ("parameter", "constant")
    operands = (inside,) if plain else tuple(o.split()[-1].lstrip("%") for o in _split(inside))
    called = tuple(
        (attribute, callee)
        for attribute, value in _CALLED.findall(_QUOTED.sub('""', attributes))
        for callee in re.findall(r"%?([\w.\-]+)", value)
    )
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        results=_arrays(rest[:shape_end]),
        operands=operands,
        called=called,
        attributes=attributes,
        is_root=match[1] is not None,
    )


def _arrays(shape: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(d.strip().lstrip("<=")) for d in dims.split(",") if d.strip()))
        for dtype, dims in _ARRAY.findall(shape)
    )


def _matching(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; quoted strings are skipped."""
    depth, i = 0, start
    while i < len(text):
        quoted = _QUOTED.match(text, i) if text[i] == '"' else None
        if quoted:
            i = quoted.end()
            continue
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth == 0:
            return i
        i += 1
    raise ValueError(f"unbalanced brackets in {text[:200]!r}")


def _split(text: str) -> list[str]:
    """The comma-separated parts at bracket depth 0, none empty."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p for p in (*parts, text[start:]) if p.strip()]
