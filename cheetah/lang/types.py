"""The types a device value can have. A scalar type called with a value makes a literal or a cast: `ty.u64(i)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cheetah.lang.errors import RangeError, SignatureError, TypeMixError
from cheetah.lang.meaning import meaning

if TYPE_CHECKING:
    from cheetah.lang.nodes import Expr, Value


@dataclass(frozen=True)
class Scalar:
    """A number: its C spelling, kind ("uint", "int", "float", "bool", "bf16", "void") and width in bits."""

    c_name: str
    kind: str
    bits: int

    @property
    def bytes(self) -> int:
        return max(1, self.bits // 8)

    @property
    def is_integer(self) -> bool:
        return self.kind in ("uint", "int")

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest integer of this type."""
        if self.kind == "uint":
            return 0, 2**self.bits - 1
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    def __call__(self, value: Value) -> Expr:
        return meaning.cast(self, value)

    def __str__(self) -> str:
        return self.c_name


@dataclass(frozen=True)
class Vector:
    """CUDA's built-in vectors (`uint4`): members x, y, z, w."""

    c_name: str
    element: Scalar
    lanes: int

    @property
    def bytes(self) -> int:
        return self.lanes * self.element.bytes

    @property
    def fields(self) -> Mapping[str, Type]:
        return dict.fromkeys("xyzw"[: self.lanes], self.element)

    def __str__(self) -> str:
        return self.c_name


@dataclass(frozen=True)
class Pointer:
    """An address of elements; `mutable` decides whether a store through it is allowed."""

    element: Type
    mutable: bool

    bytes = 8

    def __str__(self) -> str:
        return f"{'' if self.mutable else 'const '}{self.element}*"


@dataclass(frozen=True)
class Array:
    """A local array of `length` elements; the compiler keeps it in registers when every index is static."""

    element: Scalar | Vector | Array | Struct
    length: int

    @property
    def bytes(self) -> int:
        return self.length * self.element.bytes

    def __str__(self) -> str:
        return f"{self.element}[{self.length}]"


@dataclass(frozen=True)
class Struct:
    """A structure with named fields, laid out as C does."""

    c_name: str
    members: tuple[tuple[str, Type], ...]

    @property
    def fields(self) -> Mapping[str, Type]:
        return dict(self.members)

    @property
    def alignment(self) -> int:
        return max(alignment_of(t) for _, t in self.members)

    @property
    def bytes(self) -> int:
        offset = 0
        for _, member in self.members:
            offset = _round_up(offset, alignment_of(member)) + member.bytes
        return _round_up(offset, self.alignment)

    def __str__(self) -> str:
        return self.c_name


Type: TypeAlias = Scalar | Vector | Pointer | Array | Struct

void = Scalar("void", "void", 0)
boolean = Scalar("bool", "bool", 8)
u8 = Scalar("uint8_t", "uint", 8)
u16 = Scalar("uint16_t", "uint", 16)
u32 = Scalar("uint32_t", "uint", 32)
u64 = Scalar("uint64_t", "uint", 64)
i32 = Scalar("int32_t", "int", 32)
i64 = Scalar("int64_t", "int", 64)
f32 = Scalar("float", "float", 32)
f64 = Scalar("double", "float", 64)
bf16 = Scalar("bf16", "bf16", 16)
u32x2 = Vector("uint2", u32, 2)
u32x4 = Vector("uint4", u32, 4)
f32x2 = Vector("float2", f32, 2)
f32x4 = Vector("float4", f32, 4)
NAMED: dict[str, Scalar | Vector] = {
    str(one): one for one in (void, boolean, u8, u16, u32, u64, i32, i64, f32, f64, bf16, u32x2, u32x4, f32x2, f32x4)
}
"""By the names that they have in the text."""


def ptr(element: Type) -> Pointer:
    """A pointer through which nothing may be stored."""
    return _pointer(element, mutable=False)


def ptr_mut(element: Type) -> Pointer:
    """A pointer through which elements may be stored."""
    return _pointer(element, mutable=True)


def _pointer(element: Type, mutable: bool) -> Pointer:
    if isinstance(element, Array):
        raise TypeMixError(f"a pointer to {element}: point to its elements, {element.element}.")
    return Pointer(element, mutable)


def array(element: Scalar | Vector | Struct, *lengths: int) -> Array:
    """An array type, outermost length first: `array(f32, 8, 4)` is `float[8][4]`."""
    if not lengths or min(lengths) < 1:
        raise RangeError(f"an array of {element} with lengths {lengths}: give at least one, each at least 1.")
    inner: Scalar | Vector | Array | Struct = element
    for length in reversed(lengths):
        inner = Array(inner, length)
    assert isinstance(inner, Array)
    return inner


def struct(c_name: str, **members: Type) -> Struct:
    """A structure; its members are read and stored to as `place.member`."""
    taken = sorted(meaning.node_attributes & members.keys())
    if taken:
        raise SignatureError(f"struct {c_name}: a member cannot be called `{taken[0]}`, a word of the language itself.")
    if not members:
        raise SignatureError(f"struct {c_name} has no members.")
    return Struct(c_name, tuple(members.items()))


def alignment_of(type_: Type) -> int:
    """The alignment in bytes that a value of this type needs."""
    if isinstance(type_, Array):
        return alignment_of(type_.element)
    if isinstance(type_, Struct):
        return type_.alignment
    return type_.bytes


def constraint_letter(type_: Type) -> str | None:
    """The register class of an operand of inline PTX, or None where no register holds the type."""
    if isinstance(type_, Pointer):
        return "l"
    if not isinstance(type_, Scalar):
        return None
    return {
        ("float", 32): "f", ("float", 64): "d", ("uint", 16): "h", ("int", 16): "h", ("uint", 32): "r",
        ("int", 32): "r", ("uint", 64): "l", ("int", 64): "l",
    }.get((type_.kind, type_.bits))  # fmt: skip


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
