"""The Cheetah language: Python that writes CUDA. Used as `from cheetah import lang as ch`.

Plain Python runs while generating; the verbs here become device code. See docs/language.md for a walk through it.
"""

from cheetah.lang import primitives as prim
from cheetah.lang import types as ty
from cheetah.lang.binding import argument, array, const, constexpr, record, var, whole
from cheetah.lang.control import (
    break_,
    continue_,
    else_,
    for_,
    if_,
    return_,
    roles_const,
    roles_else,
    roles_for,
    roles_if,
    while_,
)
from cheetah.lang.errors import (
    AsmError,
    ConstStoreError,
    ControlError,
    CopySizeError,
    DeviceBoolError,
    LangError,
    MissingWithError,
    NoKernelError,
    NoMemberError,
    RangeError,
    RoleError,
    ScopeError,
    SignatureError,
    TypeMixError,
    UnusedStageError,
)
from cheetah.lang.functions import function, inline, outline
from cheetah.lang.kernel import Kernel, Params, kernel
from cheetah.lang.named import bits, named
from cheetah.lang.nodes import Expr, Name, Value
from cheetah.lang.operators import address_of, cast, maximum, minimum, pointee, reinterpret, select
from cheetah.lang.primitive import Primitive
from cheetah.lang.render import render, render_file
from cheetah.lang.scope import Role
from cheetah.lang.streams import Streams
from cheetah.lang.verbs import asm, block_dim_x, block_idx_x, comment, grid_dim_x, out, raw_stmt, thread_idx_x

__all__ = [
    "AsmError", "ConstStoreError", "ControlError", "CopySizeError", "DeviceBoolError", "Expr", "Kernel", "LangError",
    "MissingWithError", "Name", "NoKernelError", "NoMemberError", "Params", "Primitive", "RangeError", "Role",
    "RoleError", "ScopeError", "SignatureError", "Streams", "TypeMixError", "UnusedStageError", "Value", "address_of",
    "argument", "array", "asm", "bits", "block_dim_x", "block_idx_x", "break_", "cast", "comment", "const", "constexpr",
    "continue_", "else_", "for_", "function", "grid_dim_x", "if_", "inline", "kernel", "maximum", "minimum", "named",
    "out", "outline", "pointee", "prim", "raw_stmt", "record", "reinterpret", "render", "render_file", "return_",
    "roles_const", "roles_else", "roles_for", "roles_if", "select", "thread_idx_x", "ty", "var", "while_", "whole",
]  # fmt: skip
