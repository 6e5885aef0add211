"""The header defines exactly the language's primitives, with the types that the language gives them."""

import re

import pytest

from cheetah.emulator import compile_program, emulator_header
from cheetah.lang import types as ty
from cheetah.lang.primitive import PRIMITIVES, Primitive
from tests.emulator.kernels import OPENING

pytestmark = pytest.mark.compiler


def declared_type(type_: ty.Type) -> str:
    return f"{type_.element} (&)[{type_.length}]" if isinstance(type_, ty.Array) else str(type_)


def signature_check(primitive: Primitive) -> str:
    """C++ that compiles only when the header's function takes these types and gives this one."""
    values = ", ".join(f"std::declval<{declared_type(type_)}>()" for type_ in primitive.parameters.values())
    call = f"decltype({primitive.name}({values}))"
    return f'static_assert(std::is_same_v<{call}, {primitive.returns}>, "{primitive.name}");'


def test_the_header_and_the_language_name_the_same_primitives() -> None:
    in_header = re.findall(r"^CHEETAH_PRIMITIVE \w+\*? (\w+)\(", emulator_header().read_text(), re.MULTILINE)
    wider = {f"{primitive.name}_sys" for primitive in PRIMITIVES.values() if primitive.has_scope}
    assert sorted(set(in_header) - wider) == sorted(PRIMITIVES)


def test_the_header_and_the_language_give_them_the_same_types() -> None:
    checks = "\n".join(signature_check(primitive) for primitive in PRIMITIVES.values())
    text = f'{OPENING}#include <type_traits>\n#include <utility>\n{checks}\nextern "C" __global__ void nothing() {{}}\n'
    compile_program(text, "nothing", [])
