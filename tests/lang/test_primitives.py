"""Every primitive: its CUDA body compiles, and the emulator's header defines it too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cheetah import lang as ch
from cheetah.lang import LangError, ty
from cheetah.lang.primitive import PRIMITIVES, Primitive
from cheetah.lang.printer import parameter_text
from tests.lang.compilers import compile_cpp, compile_cuda

RUNTIME = Path(__file__).parents[2] / "cheetah" / "emulator" / "runtime"


def argument(type_: ty.Type, number: int) -> ch.Value:
    """A value of the type, made of the kernel's parameters."""
    if isinstance(type_, ty.Pointer):
        element = ty.u8 if type_.element == ty.void else type_.element
        return ch.Name(ty.ptr_mut(element), "memory" if element == ty.u8 else f"memory_{element}", ())
    if isinstance(type_, ty.Array):
        return ch.Name(type_, f"array{number}", ())
    return ch.Name(type_, f"a{number}", ())


def calling_text(primitive: Primitive) -> str:
    """A file with a kernel that calls the primitive once."""
    arguments = [argument(type_, number) for number, type_ in enumerate(primitive.parameters.values())]
    declared = "".join(
        f"{type_.element} array{number}[{type_.length}] = {{}};\n"
        if isinstance(type_, ty.Array)
        else f"{type_} a{number} = *({type_}*)memory;\n"
        for number, type_ in enumerate(primitive.parameters.values())
        if not isinstance(type_, ty.Pointer)
    )

    @ch.kernel(ch.Params(memory=ty.ptr_mut(ty.u8)), name=f"call_{primitive.name}", max_threads=32)
    def kernel(memory):
        for element in (ty.u16, ty.u32, ty.u64, ty.u32x2, ty.u32x4, ty.f32, ty.bf16):
            ch.raw_stmt(f"{element}* memory_{element} = ({element}*)memory;")
        ch.raw_stmt(declared)
        ch.raw_stmt(f"{primitive.name}({', '.join(map(str, arguments))});")

    return ch.render_file(kernel)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=PRIMITIVES.keys())
def test_the_cuda_body_compiles(primitive: Primitive) -> None:
    compile_cuda(calling_text(primitive))


@pytest.mark.compiler
def test_the_emulators_header_takes_every_call(tmp_path: Path) -> None:
    text = "".join(calling_text(primitive) for primitive in PRIMITIVES.values())
    found = compile_cpp(text, tmp_path, "-DCHEETAH_EMULATOR", "-fsyntax-only", "-I", str(RUNTIME))
    assert found.returncode == 0, found.stderr  # which names the function, and so the primitive
    assert len(re.findall(r"__global__ .*\bcall_\w+\(", text)) == len(PRIMITIVES)


def test_the_emulators_header_defines_exactly_these() -> None:
    header = (RUNTIME / "cheetah_emulator.h").read_text()
    defined = set(re.findall(r"^CHEETAH_PRIMITIVE [\w*]+ (\w+)\(", header, re.MULTILINE))
    assert defined - {f"{one.name}_sys" for one in SCOPED} == PRIMITIVES.keys()


def header_parameters(primitive: Primitive) -> tuple[str, list[tuple[str, str]]]:
    """What the emulator's header says a primitive returns, and (type, name) of each of its parameters."""
    header = (RUNTIME / "cheetah_emulator.h").read_text()
    found = re.search(rf"^CHEETAH_PRIMITIVE ([\w*]+) {primitive.name}\((.*?)\) \{{", header, re.MULTILINE | re.DOTALL)
    assert found, primitive.name
    listed = [item.strip() for item in found[2].split(",") if item.strip() not in ("", "CHEETAH_PLACE")]
    return found[1], [type_and_name(item) for item in listed]


def type_and_name(parameter: str) -> tuple[str, str]:
    """`const float (&x)[8]` is an array of 8 floats, a `const uint4&` a uint4: what a caller gives is the same."""
    array = re.fullmatch(r"(?:const )?(\w+) \(&(\w+)\)(\[\d+\])", parameter)
    if array:
        return array[1] + array[3], array[2]
    parts = re.fullmatch(r"(.*?)(?:(?<=[*&]) ?| )(\w+)|(\w+)", parameter)
    assert parts, parameter
    type_, name = (parts[1], parts[2]) if parts[1] else (parts[3], "")
    return re.sub(r"^const (\w+)&$", r"\1", type_), name


@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=PRIMITIVES.keys())
def test_the_emulators_header_declares_the_same_types(primitive: Primitive) -> None:
    """C++ would convert others silently; parameters of one type are told apart by their names."""
    returns, found = header_parameters(primitive)
    declared = [type_and_name(parameter_text(name, type_)) for name, type_ in primitive.parameters.items()]
    types = [type_ for type_, _ in declared]
    assert (returns, [type_ for type_, _ in found]) == (str(primitive.returns), types)
    alike = [number for number, type_ in enumerate(types) if types.count(type_) > 1]
    assert [found[number] for number in alike] == [declared[number] for number in alike]


SCOPED = [primitive for primitive in PRIMITIVES.values() if primitive.has_scope]


@pytest.mark.compiler
def test_a_wider_scope_changes_that_word_alone_and_compiles() -> None:
    assert {one.name for one in SCOPED} >= {"publish_flagged", "wait_flagged4_acquire", "add_release_u64"}
    for primitive in SCOPED:
        wider = primitive.in_scope("sys")
        assert wider.name == f"{primitive.name}_sys" and wider is primitive.in_scope("sys")
        assert wider.cuda.replace(".sys.", ".gpu.") == primitive.cuda and primitive.in_scope("gpu") is primitive

    @ch.kernel(ch.Params(words=ty.ptr_mut(ty.u64)), max_threads=32)
    def kernel(words):
        ch.prim.publish_flagged(words, 1, 2, scope="sys")
        ch.prim.wait_flagged4(words, 2, scope="sys")
        ch.prim.add_release_u64(words, 1, scope="sys")

    text = ch.render_file(kernel)
    assert "st.relaxed.sys.global.u64" in text and ".gpu." not in text
    compile_cuda(text)


def test_a_scope_that_there_is_not_is_refused() -> None:
    with pytest.raises(LangError, match="publish_flagged has no memory scope 'cta': give one of gpu, sys"):
        ch.prim.publish_flagged.in_scope("cta")
    with pytest.raises(LangError, match="warp_barrier has no memory scope 'sys': it orders nothing between blocks"):
        ch.prim.warp_barrier.in_scope("sys")


def test_the_emulators_header_names_every_wider_scope() -> None:
    header = (RUNTIME / "cheetah_emulator.h").read_text()
    as_narrow = re.findall(r"^#define (\w+)_sys \1$", header, re.MULTILINE)
    by_itself = re.findall(r"^CHEETAH_PRIMITIVE [\w*]+ (\w+)_sys\(", header, re.MULTILINE)
    assert sorted(as_narrow + by_itself) == sorted(primitive.name for primitive in SCOPED)


@pytest.mark.compiler
def test_all_cuda_bodies_compile_together() -> None:
    @ch.kernel(ch.Params(), max_threads=32)
    def kernel():
        ch.raw_stmt("\n".join(f"(void)sizeof(&{name});" for name in PRIMITIVES))

    compile_cuda(ch.render_file(kernel))


def test_every_primitive_says_what_it_means() -> None:
    assert all(primitive.meaning for primitive in PRIMITIVES.values())
    assert PRIMITIVES["store_shared_u32"].requires == ["shared_address"]
    assert {name for name in PRIMITIVES if not hasattr(ch.prim, name)} == set()
