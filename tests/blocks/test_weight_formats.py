"""To add a weight format: a file a layer, a line in each registry. Here a toy one, in some matrices of a whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cheetah import lang as ch
from cheetah.blocks.linear.formats import FRAGMENTS
from cheetah.blocks.linear.fragments import Activations, Fragments
from cheetah.generate import choose_plan, generate_pass
from cheetah.lang import prim, ty
from cheetah.models.formats import WEIGHT_FORMATS, WeightFormat, pack_matrix, unpack_matrix
from cheetah.models.formats.weight_format import TilePart
from cheetah.models.rounding import F32, Bits, widen
from cheetah.plan import MatrixLayout, PlanError, gpu_named
from cheetah.plan.formats import TILE_FORMATS, TileFormat
from cheetah.plan.prompt import PassPlan
from tests.program.rig import RandomWeights, Rig, as_bf16, float32_logits, model, relative_error, token_ids
from tests.tolerances import LOGITS

# -- its sizes: 64 columns, a byte a weight

TOY = TileFormat("toy", 64, 16 * 64)
SCALE = 64


# -- its bytes


class ToyFormat(WeightFormat):
    """Signed bytes, each a 64th; a tile row by row."""

    def encode(self, rows: Bits) -> tuple[TilePart, ...]:
        tiles = widen(rows).reshape(-1, 16, rows.shape[-1] // 64, 64).transpose(0, 2, 1, 3)
        codes = np.clip(np.rint(tiles * SCALE), -127, 127).astype(np.int8)
        return (TilePart(0, codes.view(np.uint8).reshape(*tiles.shape[:2], -1)),)

    def decode(self, tiles: Any, factors: Any) -> Bits:
        codes = tiles.view(np.int8).reshape(*tiles.shape[:2], 16, 64)
        return as_bf16(codes.transpose(0, 2, 1, 3).reshape(len(tiles) * 16, -1).astype(np.float32) / SCALE)

    def meaning(self, weights: F32) -> F32:
        return np.asarray(np.clip(np.rint(weights * SCALE), -127, 127) / np.float32(SCALE))


# -- its fragments on the device


class ToyFragments(Fragments):
    """Codes become bf16, exactly."""

    @ch.inline
    def declare(self) -> None:
        codes = self.stage.address
        self.codes = codes

    @ch.inline
    def multiply(self, tile: ch.Expr, activations: Activations, sums: Any) -> None:
        first = self.codes + tile * TOY.tile_bytes
        units = activations.units
        for part in range(2):
            for half in range(2):
                row, column = self.lane // 4, self.lane % 4 * 8 + (part * 32 + half * 4)
                words = [self._pair(first, row + 8 * (n % 2), column + n // 2 * 2) for n in range(4)]
                fragment = ch.const(ty.u32x4, prim.make_u32x4(*words), name="fragment")
                for group in range(activations.columns.tiles):
                    values = activations.operand(units, group, part)
                    operand = (values.x, values.y) if half == 0 else (values.z, values.w)
                    prim.mma_bf16(sums[group], fragment, *operand)
                self.stage.has_read(fragment.x ^ fragment.y ^ fragment.z ^ fragment.w)

    def _pair(self, first: ch.Expr, row: Any, column: Any) -> Any:
        return prim.pack_bf16x2(*(self._value(first[row * 64 + column + number]) for number in range(2)))

    @staticmethod
    def _value(code: ch.Expr) -> Any:
        number = ty.f32(ty.u32(code))
        return ch.select(number > 127.0, number - 256.0, number) * (1.0 / SCALE)


# -- what it must do


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three lines of the registries."""
    monkeypatch.setitem(TILE_FORMATS, "toy", TOY)
    monkeypatch.setitem(WEIGHT_FORMATS, "toy", ToyFormat())
    monkeypatch.setitem(FRAGMENTS, "toy", ToyFragments)


@pytest.mark.parametrize("name", ["bf16", "toy"])
@pytest.mark.parametrize(("rows", "columns", "blocks"), [(16, 64, 1), (50, 200, 3), (7, 33, 2), (64, 1000, 5)])
def test_unpacking_gives_what_was_packed(toy: None, name: str, rows: int, columns: int, blocks: int) -> None:
    format = TILE_FORMATS[name]
    layout = MatrixLayout("w", rows, columns, blocks, 4 * format.tile_bytes, format=format)
    matrix = as_bf16(np.random.default_rng(rows).standard_normal((rows, columns)))
    packed = pack_matrix(layout, matrix)
    assert packed.size == layout.total_bytes
    found = widen(unpack_matrix(layout, packed))
    np.testing.assert_array_equal(found, WEIGHT_FORMATS[name].meaning(widen(matrix)))
    if name == "bf16":
        np.testing.assert_array_equal(found, widen(matrix))


def test_every_format_has_its_three_homes() -> None:
    assert set(TILE_FORMATS) == set(WEIGHT_FORMATS) == set(FRAGMENTS)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(PlanError, match="no weight format 'int3': there are bf16"):
        replace(model().shape, formats=(("o", "int3"),))


def test_passes_refuse_a_format_that_they_do_not_know(toy: None) -> None:
    matrices = ("qkv", "o", "gate_up", "down")
    config = replace(model(), weight_formats=tuple((matrix, "toy") for matrix in matrices))
    plan = choose_plan(config, gpu_named("emulator-2"), consumer_warps=2, max_context=128)
    with pytest.raises(PlanError, match="bf16, quantised and sparse ones, and not those of qkv in toy"):
        generate_pass(config, "emulator-2", plan, PassPlan(tokens=64, tile_tokens=16, warpgroups=1, key_tile=16))


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("fields", [{}, {"tokens": 2, "down_slices": 2}])
def test_a_step_with_some_matrices_in_another_format(toy: None, fields: dict[str, Any]) -> None:
    matrices = ("o", "gate_up", "down")
    config = replace(model(), weight_formats=tuple((matrix, "toy") for matrix in matrices))
    weights = RandomWeights(config)
    rig = Rig(weights, blocks=3, consumer_warps=2, max_context=128, **fields)
    ids = token_ids(12, config.vocab_size)
    found = rig.session("random", 1).score(ids)
    assert relative_error(found, float32_logits(weights, ids)) < LOGITS
