"""Machine code for arm64: each access to a word of a peer has the order that the algorithms need.

LLVM compiles for arm64 on any machine, so these tests need no such processor. They check which
instructions access memory: arm64 reorders plain loads and stores, except around the instructions in
`_ORDERED`.
"""

from __future__ import annotations

import re

import pytest
from llvmlite import binding, ir
from numba import types
from numba.core import compiler
from numba.core.registry import cpu_target

from r2ccl.kernels.compiling import intrinsic
from r2ccl.shm import atomics, frames, waiting

_TRIPLE = "aarch64-unknown-linux-gnu"
_I64 = types.int64
#: Instructions that order memory accesses. ``ldapr`` is an acquire load that an earlier ``stlr`` to
#: another word may pass, ``ldar`` one that it may not.
_ORDERED = ("ldar", "ldapr", "stlr", "ldaxr", "stlxr", "ldaddal", "dmb")
#: Without and with the optional instructions: atomics (LSE), and ``ldapr`` (RCPC).
_FEATURES = ("", "+lse", "+lse,+rcpc")


def _has_target() -> bool:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        binding.Target.from_triple(_TRIPLE)
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_target(), reason="this llvmlite cannot compile for arm64")


@pytest.fixture(autouse=True)
def arm64(monkeypatch):
    monkeypatch.setattr(atomics, "MACHINE", "aarch64")


def instructions(function, nargs, features, result=types.void):
    """Compile a function for arm64; return its instructions with their operands.

    Its `nargs` arguments are integers, except an argument named `state`, which is a pointer.
    """
    flags = compiler.Flags()
    flags.nrt, flags.no_compile, flags.error_model = False, True, "numpy"
    names = function.__code__.co_varnames[:nargs]
    arguments = tuple(types.CPointer(_I64) if name == "state" else _I64 for name in names)
    typing, target = cpu_target.typing_context, cpu_target.target_context
    done = compiler.compile_extra(typing, target, function, arguments, result, flags, {})
    text = re.sub(r'(?m)^target .*\n|"target-\w+"="[^"]*"', "", done.library.get_llvm_str())
    module = binding.parse_assembly(f'target triple = "{_TRIPLE}"\n{text}')
    machine = binding.Target.from_triple(_TRIPLE).create_target_machine(features=features, opt=3)
    name = re.escape(done.fndesc.llvm_func_name)
    found = re.search(rf"(?ms)^\"?{name}\"?:$(.*?)^\.Lfunc_end", machine.emit_assembly(module))
    assert found is not None
    lines = (line.split("//")[0].split() for line in found[1].splitlines())
    return [(each[0], " ".join(each[1:])) for each in lines if each and each[0][0] not in "./"]


def order(function, nargs, features, result=types.void):
    """Return the instructions of `_ORDERED` in the compiled function, in their order."""
    found = instructions(function, nargs, features, result)
    return [f"{name} {args}" if name == "dmb" else name for name, args in found if name in _ORDERED]


def plain_accesses(function, nargs, features, register, result=types.void):
    """Return the unordered loads and stores at the address in `register`."""
    return [
        name
        for name, args in instructions(function, nargs, features, result)
        if re.match(r"(ld|st)", name)
        and name not in _ORDERED
        and re.search(rf"\[{register}\b", args)
    ]


def _load_acquire(word):
    return atomics.load_acquire(word)


def _load_ordered(word):
    return atomics.load_ordered(word)


def _store_release(word, value):
    atomics.store_release(word, value)


def _add(word, value):
    return atomics.add(word, value)


def _stream(target, source, word):
    atomics.stream(target, source)
    atomics.stream_fence()
    atomics.store_release(word, 1)


@intrinsic
def load_relaxed(typing_context, address):
    def generate(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "monotonic", 8)

    return types.int64(types.int64), generate


def _load_relaxed(word):
    return load_relaxed(word)


# Numba's functions take the addresses of the result and of an error in x0 and x1.


@pytest.mark.parametrize("features", _FEATURES)
def test_loads_acquire(features):
    wanted = "ldapr" if "rcpc" in features else "ldar"
    assert order(_load_acquire, 1, features, _I64) == [wanted]
    assert plain_accesses(_load_acquire, 1, features, "x2", _I64) == []


@pytest.mark.parametrize("features", _FEATURES)
def test_ordered_loads_are_sequentially_consistent(features):
    assert order(_load_ordered, 1, features, _I64) == ["ldar"]
    assert plain_accesses(_load_ordered, 1, features, "x2", _I64) == []


@pytest.mark.parametrize("features", _FEATURES)
def test_stores_release(features):
    assert order(_store_release, 2, features) == ["stlr"]
    assert plain_accesses(_store_release, 2, features, "x2") == []


@pytest.mark.parametrize("features", _FEATURES)
def test_additions_are_sequentially_consistent(features):
    wanted = ["ldaddal"] if features else ["ldaxr", "stlxr"]
    assert order(_add, 2, features, _I64) == wanted
    assert plain_accesses(_add, 2, features, "x2", _I64) == []


def test_an_unordered_load_is_told_apart():
    assert order(_load_relaxed, 1, "", _I64) == []
    assert plain_accesses(_load_relaxed, 1, "", "x2", _I64) == ["ldr"]


@pytest.mark.parametrize("features", _FEATURES)
def test_a_fence_called_from_python_is_a_full_barrier(features):
    assert order(atomics.make_fence(), 0, features, _I64) == ["dmb ish"]


@pytest.mark.parametrize("features", _FEATURES)
def test_streamed_bytes_are_ordered_before_the_word(features):
    assert order(_stream, 3, features) == ["dmb ish", "stlr"]


@pytest.mark.parametrize("features", _FEATURES)
def test_a_publication_is_ordered_before_the_look_at_sleepers(features):
    load = "ldapr" if "rcpc" in features else "ldar"
    assert order(waiting.publish, 2, features) == ["stlr", "dmb ish", load]
    assert plain_accesses(waiting.publish, 2, features, "x2") == []


@pytest.mark.parametrize("features", _FEATURES)
def test_a_sleeper_is_counted_before_it_reads_the_word(features):
    found = order(waiting.wait, 4, features, types.boolean)
    added = ["ldaddal"] if features else ["ldaxr", "stlxr"]
    load = "ldapr" if "rcpc" in features else "ldar"
    sleep = [*added, "ldar", *added, load]
    assert any(found[at : at + len(sleep)] == sleep for at in range(len(found))), found
    assert load == found[0]


@pytest.mark.parametrize("features", _FEATURES)
def test_a_frame_is_ordered_before_the_bell(features):
    load = "ldapr" if "rcpc" in features else "ldar"
    assert order(frames.ring_bell, 1, features)[:2] == ["dmb ish", load]
