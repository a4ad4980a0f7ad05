"""PTX interpreter: runs a kernel's text on host memory, thread by thread.

It supports the instructions that the compiler generates for the kernels; any other instruction is
an error. Written from the PTX ISA, with NumPy's arithmetic; registers hold bits, as integers.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from r2ccl.kernels.cuda import twins

_SHARED = 1 << 60  # first address of shared memory
_FLOATS = {"f32": np.float32, "f64": np.float64}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "nan": lambda a, b: bool(np.isnan(a) or np.isnan(b)),
}


class Instruction(NamedTuple):
    """Predicate, opcode and operands of an instruction."""

    guard: str
    opcode: str
    operands: list[str]


class Kernel:
    """Parsed text of a kernel.

    Parameters
    ----------
    text : str
        PTX with one entry.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        self.parameters = re.findall(r"\.param \.(\w+) (\w+)", text)
        self.shared = {name: int(size) for name, size in
                       re.findall(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]", text)}  # fmt: skip
        self.labels: dict[str, int] = {}
        #: Number of loads and stores in global memory so far, by their size in bytes.
        self.accesses: Counter[int] = Counter()
        self.instructions: list[Instruction] = []
        body = text[text.index("{") + 1 : text.rindex("}")]
        for statement in body.split(";"):
            self._take(statement)

    def _take(self, statement: str) -> None:
        # Labels, and the braces of inline PTX declarations, may precede an instruction.
        while match := re.match(r"\s*(?:(\$\w+):|[{}])\s*|\s+", statement):
            if match[1]:
                self.labels[match[1]] = len(self.instructions)
            statement = statement[match.end() :]
        if not statement or statement.startswith(".reg"):
            return
        match = re.match(r"(?:@(!?%?\w+)\s+)?([\w.]+)\s*(.*)", statement, re.DOTALL)
        assert match, statement
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", match[3])
        self.instructions.append(Instruction(match[1] or "", match[2], operands))

    def run(
        self, nblocks: int, nthreads: int, values: Sequence[int], windows: Sequence[range]
    ) -> None:
        """Run all threads.

        Parameters
        ----------
        nblocks, nthreads : int
        values : sequence of int
            Bits of the parameters.
        windows : sequence of range
            Addresses that may be read and written.
        """
        named = {name: value for (_, name), value in zip(self.parameters, values, strict=True)}
        for block in range(nblocks):
            shared = {name: bytearray(size) for name, size in self.shared.items()}
            threads = [
                _Thread(self, named, shared, windows, (thread, nthreads, block, nblocks)).run()
                for thread in range(nthreads)
            ]
            while threads:  # each thread runs to the next barrier, or to its end
                threads = [each for each in threads if next(each, None) is not None]


class _Thread:
    """Thread with its registers."""

    def __init__(
        self, kernel: Kernel, parameters: dict[str, int], shared: dict[str, bytearray],
        windows: Sequence[range], place: tuple[int, int, int, int],
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.parameters = parameters
        self.windows = windows
        self.registers: dict[str, Any] = dict(
            zip(("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x"), place, strict=True)
        )
        self.memory: dict[str, Any] = {}
        for i, (name, room) in enumerate(shared.items()):
            self.registers[name] = _SHARED + (i << 32)
            self.memory[name] = room

    def run(self) -> Generator[str]:
        """Run to the end; yield at barriers."""
        at = 0
        while True:
            guard, opcode, operands = self.kernel.instructions[at]
            at += 1
            if guard and bool(self.registers[guard.lstrip("!")]) == guard.startswith("!"):
                continue
            name, *modifiers = opcode.split(".")
            if name == "ret":
                return
            if name == "bra":
                at = self.kernel.labels[operands[0]]
            elif name == "bar":
                yield "barrier"
            else:
                getattr(self, f"_{name}", self._unknown)(modifiers, operands)

    def _unknown(self, modifiers: list[str], operands: list[str]) -> None:
        raise NotImplementedError(f"teach this interpreter: ...{'.'.join(modifiers)} {operands}")

    # Operands

    def _get(self, operand: str) -> Any:
        if operand in self.registers:
            return self.registers[operand]
        if operand[:2] in ("0f", "0d"):
            return int(operand[2:], 16)
        return int(operand, 0)

    def _read(self, operand: str, kind: str) -> Any:
        """Return an operand as a value of type `kind`."""
        value = self._get(operand)
        if kind in _FLOATS:
            return np.array([value], f"u{int(kind[1:]) // 8}").view(_FLOATS[kind])[0]
        if kind == "pred":
            return bool(value)
        bits = int(kind[1:])
        value &= (1 << bits) - 1
        return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value

    def _write(self, operand: str, kind: str, value: Any) -> None:
        """Set a register to the bits of a value of type `kind`."""
        if kind in _FLOATS:
            value = int(np.array([value], _FLOATS[kind]).view(f"u{int(kind[1:]) // 8}")[0])
        elif kind == "pred":
            value = bool(value)
        else:
            value = int(value) & ((1 << int(kind[1:])) - 1)
        self.registers[operand] = value

    def _place(self, operand: str) -> int:
        base, _, offset = operand.strip("[]").partition("+")
        return int(self._get(base)) + int(offset or 0)

    def _room(self, address: int, nbytes: int) -> Any:
        assert address % nbytes == 0, f"{address:#x} is not aligned to {nbytes} bytes"
        if address < _SHARED:
            self.kernel.accesses[nbytes] += 1
            last = address + nbytes - 1
            assert any(address in each and last in each for each in self.windows), hex(address)
            return (ctypes.c_uint8 * nbytes).from_address(address)
        name = list(self.memory)[(address - _SHARED) >> 32]
        start = (address - _SHARED) & 0xFFFFFFFF
        return memoryview(self.memory[name])[start : start + nbytes]

    # Memory

    def _ld(self, modifiers: list[str], operands: list[str]) -> None:
        kind = modifiers[-1]
        if modifiers[0] == "param":
            self.registers[operands[0]] = self.parameters[operands[1].strip("[]")]
            return
        nbytes = int(kind[1:]) // 8
        targets = operands[0].strip("{}").replace(",", " ").split()
        data = bytes(self._room(self._place(operands[1]), nbytes * len(targets)))
        for i, target in enumerate(targets):
            piece = data[i * nbytes : (i + 1) * nbytes]
            self.registers[target] = int.from_bytes(piece, "little")

    def _st(self, modifiers: list[str], operands: list[str]) -> None:
        nbytes = int(modifiers[-1][1:]) // 8
        mask = (1 << 8 * nbytes) - 1
        sources = operands[1].strip("{}").replace(",", " ").split()
        data = b"".join((self._get(each) & mask).to_bytes(nbytes, "little") for each in sources)
        self._room(self._place(operands[0]), len(data))[:] = data

    # Moves and conversions

    def _mov(self, modifiers: list[str], operands: list[str]) -> None:
        target, source = operands
        if target.startswith("{"):
            parts = target.strip("{}").replace(",", " ").split()
            bits = int(modifiers[0][1:]) // len(parts)
            for i, part in enumerate(parts):
                self.registers[part] = self._get(source) >> (bits * i) & ((1 << bits) - 1)
        elif source.startswith("{"):
            parts = source.strip("{}").replace(",", " ").split()
            bits = int(modifiers[0][1:]) // len(parts)
            self.registers[target] = sum(
                (self._get(part) & ((1 << bits) - 1)) << (bits * i) for i, part in enumerate(parts)
            )
        else:
            self.registers[target] = self._get(source)

    def _cvt(self, modifiers: list[str], operands: list[str]) -> None:
        *rounding, to, kind = modifiers
        if to.endswith("x2"):
            assert (rounding, kind) == (["rn"], "f32")
            high, low = (self._read(each, "f32") for each in operands[1:])
            word = twins.instruction(f"narrow.{to}")((low, high))
            self._write(operands[0], "u32", word)
        elif kind == "f16":
            half = np.array([self._get(operands[1]) & 0xFFFF], np.uint16).view(np.float16)[0]
            self._write(operands[0], to, np.float32(half))
        else:
            assert not rounding, modifiers
            self._write(operands[0], to, self._read(operands[1], kind))

    def _prmt(self, modifiers: list[str], operands: list[str]) -> None:
        low, high, selector = (self._get(each) for each in operands[1:])
        source = (low & 0xFFFFFFFF | high << 32).to_bytes(8, "little")
        nibbles = [selector >> (4 * i) & 15 for i in range(4)]
        chosen = bytes(
            (0xFF if source[n & 7] & 0x80 else 0) if n & 8 else source[n & 7] for n in nibbles
        )
        self._write(operands[0], "u32", int.from_bytes(chosen, "little"))

    def _selp(self, modifiers: list[str], operands: list[str]) -> None:
        target, first, second, predicate = operands
        self.registers[target] = self._get(first if self.registers[predicate] else second)

    def _setp(self, modifiers: list[str], operands: list[str]) -> None:
        compare, kind = modifiers
        left, right = (self._read(each, kind) for each in operands[1:])
        self.registers[operands[0]] = _COMPARE[compare](left, right)

    # Arithmetic

    def _apply(self, function: Callable[..., Any], kind: str, operands: list[str]) -> None:
        with np.errstate(all="ignore"):
            result = function(*(self._read(each, kind) for each in operands[1:]))
        self._write(operands[0], kind, result)

    def _float(self, name: str, modifiers: list[str], operands: list[str]) -> bool:
        """Apply a float instruction; return False for others. It must name its rounding mode."""
        *how, kind = modifiers
        expected = {"add": "rn", "mul": "rn", "div": "rn", "fma": "rn", "min": "NaN", "max": "NaN"}
        if "f" not in kind:
            return False
        if kind == "f64" and name in ("min", "max"):
            assert not how
            self._apply({"min": np.fmin, "max": np.fmax}[name], kind, operands)
            return True
        assert how == [expected[name]], (name, modifiers)
        if kind == "bf16x2" and name == "fma":
            self._apply(_fma_of_pairs, "b32", operands)
        else:
            registers = "b32" if kind.endswith("x2") else kind
            self._apply(twins.instruction(f"{name}.{kind}"), registers, operands)
        return True

    def _add(self, modifiers: list[str], operands: list[str]) -> None:
        if not self._float("add", modifiers, operands):
            self._apply(lambda a, b: a + b, modifiers[-1], operands)

    def _sub(self, modifiers: list[str], operands: list[str]) -> None:
        assert "f" not in modifiers[-1]
        self._apply(lambda a, b: a - b, modifiers[-1], operands)

    def _mul(self, modifiers: list[str], operands: list[str]) -> None:
        if self._float("mul", modifiers, operands):
            return
        part, kind = modifiers
        product = self._read(operands[1], kind) * self._read(operands[2], kind)
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        self._write(operands[0], {"lo": kind, "wide": wide}[part], product)

    def _mad(self, modifiers: list[str], operands: list[str]) -> None:
        assert modifiers[0] == "lo"
        self._apply(lambda a, b, c: a * b + c, modifiers[-1], operands)

    def _fma(self, modifiers: list[str], operands: list[str]) -> None:
        assert self._float("fma", modifiers, operands)

    def _div(self, modifiers: list[str], operands: list[str]) -> None:
        if not self._float("div", modifiers, operands):
            self._apply(lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
                        modifiers[-1], operands)  # fmt: skip

    def _min(self, modifiers: list[str], operands: list[str]) -> None:
        if not self._float("min", modifiers, operands):
            self._apply(min, modifiers[-1], operands)

    def _max(self, modifiers: list[str], operands: list[str]) -> None:
        if not self._float("max", modifiers, operands):
            self._apply(max, modifiers[-1], operands)

    def _neg(self, modifiers: list[str], operands: list[str]) -> None:
        self._apply(lambda a: -a, modifiers[-1], operands)

    # Bits

    def _and(self, modifiers: list[str], operands: list[str]) -> None:
        self._apply(lambda a, b: a & b, modifiers[-1], operands)

    def _or(self, modifiers: list[str], operands: list[str]) -> None:
        self._apply(lambda a, b: a | b, modifiers[-1], operands)

    def _xor(self, modifiers: list[str], operands: list[str]) -> None:
        self._apply(lambda a, b: a ^ b, modifiers[-1], operands)

    def _not(self, modifiers: list[str], operands: list[str]) -> None:
        self._apply(lambda a: not a if isinstance(a, bool) else ~a, modifiers[-1], operands)

    def _shl(self, modifiers: list[str], operands: list[str]) -> None:
        by = self._read(operands[2], "u32")
        self._apply(lambda a: a << by, modifiers[-1], operands[:2])

    def _shr(self, modifiers: list[str], operands: list[str]) -> None:
        by = self._read(operands[2], "u32")
        self._apply(lambda a: a >> by, modifiers[-1], operands[:2])


def _fma_of_pairs(a: int, b: int, c: int) -> int:
    """Compute ``fma.rn.bf16x2`` for sums or products only.

    For these, float64 is exact, or precise enough to round to the same result.
    """
    x, y, z = (np.array([each], np.uint32).view(ml_dtypes.bfloat16) for each in (a, b, c))
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return int(exact.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint32)[0])
