"""Static numbers with a name in the text: what is computed with them, and where their names stand."""

from __future__ import annotations

import re

import pytest

from cheetah import lang as ch
from cheetah.lang import ty

BLOCKS = ch.named("BLOCKS", 132)
WORDS = ch.named("WORDS", 96)


def body(*values: object) -> list[str]:
    """What stands for each value behind `x[n] = n + `."""

    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32), n=ty.u32))
    def kernel(x, n):
        for value in values:
            x[n] = n + value

    return [line.strip()[11:-1] for line in ch.render(kernel).splitlines()[1:-1]]


def test_a_name_stands_for_the_number_and_for_what_is_made_of_it() -> None:
    assert body(BLOCKS, BLOCKS * 4, 4 + BLOCKS, BLOCKS - 1, BLOCKS // 2, BLOCKS * WORDS) == [
        *("BLOCKS", "BLOCKS * 4", "(4 + BLOCKS)", "(BLOCKS - 1)", "BLOCKS / 2", "BLOCKS * WORDS")
    ]


def test_formulas_have_the_parentheses_that_they_need() -> None:
    formulas = {
        "(BLOCKS * 4 + 1)": BLOCKS * 4 + 1,
        "(BLOCKS + 1) * WORDS": (BLOCKS + 1) * WORDS,
        "BLOCKS / (WORDS / 4)": BLOCKS // (WORDS // 4),
        "BLOCKS / 2 / 3": BLOCKS // 2 // 3,
        "(BLOCKS - (WORDS - 8))": BLOCKS - (WORDS - 8),
        "BLOCKS * WORDS * 2": BLOCKS * (WORDS * 2),
        "BLOCKS * (WORDS / 2)": BLOCKS * (WORDS // 2),
        "BLOCKS % WORDS": BLOCKS % WORDS,
        "(200 - BLOCKS)": 200 - BLOCKS,
    }
    assert body(*formulas.values()) == list(formulas)
    values = {"BLOCKS": 132, "WORDS": 96}
    assert [eval(text.replace("/", "//"), values) for text in formulas] == [int(made) for made in formulas.values()]


def test_longer_formulas_are_their_value() -> None:
    assert body(BLOCKS * 4 + 1 + WORDS * 2, BLOCKS * 4 + 1 + WORDS * 2 - 8) == ["(BLOCKS * 4 + 1 + WORDS * 2)", "713"]
    assert body(-BLOCKS + 140, max(BLOCKS, 7) * 1, 0 * BLOCKS + 9) == ["8", "BLOCKS", "9"]


def test_patterns_of_bits_are_defined_in_hexadecimal() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32), n=ty.u32))
    def kernel(x, n):
        x[0] = n & ch.bits("EVEN", 0x5555) | ch.bits("SIGN", 1 << 31)

    text = ch.render_file(kernel)
    assert "constexpr uint32_t EVEN = 0x5555;\nconstexpr uint32_t SIGN = 0x80000000u;\n" in text
    assert "x[0] = (n & EVEN) | SIGN;" in text


def test_python_computes_with_ints() -> None:
    assert len(range(BLOCKS)) == 132 and f"{BLOCKS}" == "132" and {BLOCKS: 1}[132] == 1
    assert BLOCKS * 2.5 == 330.0 and BLOCKS + 0 is BLOCKS and BLOCKS // 1 is BLOCKS and BLOCKS * 0 == 0
    assert body(ty.u32(BLOCKS)) == ["BLOCKS"] and type(BLOCKS * 2**30) is int


def test_parentheses_and_types() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u64), n=ty.u32, m=ty.i32))
    def kernel(x, n, m):
        x[n % (BLOCKS // 2)] = ty.u64(n & (BLOCKS - 1)) * (WORDS * 2) + ty.u64(ch.minimum(n, BLOCKS))
        with ch.if_(m < ty.i32(BLOCKS)):
            x[BLOCKS] = ty.u64(1) << BLOCKS // 4

    text = ch.render_file(kernel)
    assert "x[n % (BLOCKS / 2)] = (uint64_t)(n & (BLOCKS - 1)) * (WORDS * 2) + (uint64_t)(min(n, BLOCKS));" in text
    assert "if (m < 132) x[BLOCKS] = " in text
    assert text.count("constexpr uint32_t BLOCKS = 132;\n") == text.count("constexpr uint32_t WORDS = 96;\n") == 1


def test_sums_keep_the_name_and_fold_what_has_none() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32), n=ty.u32))
    def kernel(x, n):
        x[n + 1 + 2 + WORDS + 3] = 0
        x[n * 2 * WORDS] = 0

    lines = [line.strip() for line in ch.render(kernel).splitlines()]
    assert lines[1:3] == ["x[n + 3 + WORDS + 3] = 0;", "x[n * 2 * WORDS] = 0;"]


@pytest.mark.parametrize(("name", "value"), [("blocks", 1), ("A B", 1), ("BLOCKS", -1), ("BLOCKS", 2**64)])
def test_refused_names_and_numbers(name: str, value: int) -> None:
    with pytest.raises(ch.SignatureError, match=re.escape(f"ch.named: {name!r} for {value}: give a name in capitals")):
        ch.named(name, value)


def test_a_number_beyond_32_bits_is_a_wide_one() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u64), n=ty.u64))
    def kernel(x, n):
        x[0] = n * ch.named("LAYER", 5 * 2**30)

    text = ch.render_file(kernel)
    assert "constexpr uint64_t LAYER = 5368709120ull;\n" in text and "x[0] = n * LAYER;" in text


def test_a_name_for_two_numbers_is_refused() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32), n=ty.u32))
    def kernel(x, n):
        x[n + BLOCKS] = n + ch.named("BLOCKS", 8)

    with pytest.raises(ch.SignatureError, match="`BLOCKS` is 132 here and 8 there"):
        ch.render_file(kernel)


def test_a_name_that_a_constant_has_is_refused() -> None:
    @ch.kernel(ch.Params(x=ty.ptr_mut(ty.u32), n=ty.u32))
    def kernel(x, n):
        x[n + BLOCKS] = n + ch.constexpr(ty.u32, "BLOCKS", 132)

    with pytest.raises(ch.SignatureError, match="the name `BLOCKS` is taken by a constant"):
        ch.render_file(kernel)
