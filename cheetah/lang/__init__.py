"""The Cheetah language: Python that writes CUDA. Used as `from cheetah import lang as ch`.

Plain Python runs while generating; the verbs here become device code. See docs/language.md for a walk through it.
"""

from cheetah.lang import primitives as prim
from cheetah.lang import types as ty
from cheetah.lang.arena import Arena, SharedPointers
from cheetah.lang.errors import (
    ConstStoreError,
    CopySizeError,
    DeviceBoolError,
    IndexNameError,
    LangError,
    MissingWithError,
    NoKernelError,
    RangeError,
    ScopeError,
    SharedBudgetError,
    TypeMixError,
    UnusedStageError,
)
from cheetah.lang.expressions import Expr, Name, Value, address_of, cast, minimum, reinterpret, select
from cheetah.lang.index import Index, Layout, View
from cheetah.lang.kernel import Kernel, Params, inline, kernel
from cheetah.lang.primitives import Primitive
from cheetah.lang.render import render, render_file
from cheetah.lang.scope import Role
from cheetah.lang.statements import (
    array,
    asm,
    block_dim_x,
    block_idx_x,
    break_,
    comment,
    const,
    continue_,
    else_,
    for_,
    grid_dim_x,
    if_,
    out,
    raw_stmt,
    return_,
    roles_for,
    thread_idx_x,
    var,
    while_,
)

__all__ = [
    "Arena", "ConstStoreError", "CopySizeError", "DeviceBoolError", "Expr", "Index", "IndexNameError", "Kernel",
    "LangError", "Layout", "MissingWithError", "Name", "NoKernelError", "Params", "Primitive", "RangeError", "Role",
    "ScopeError", "SharedBudgetError", "SharedPointers", "TypeMixError", "UnusedStageError", "Value", "View",
    "address_of", "array", "asm", "block_dim_x", "block_idx_x", "break_", "cast", "comment", "const", "continue_",
    "else_", "for_", "grid_dim_x", "if_", "inline", "kernel", "minimum", "out", "prim", "raw_stmt", "reinterpret",
    "render", "render_file", "return_", "roles_for", "select", "thread_idx_x", "ty", "var", "while_",
]  # fmt: skip
