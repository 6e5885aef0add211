"""The model as a page: what phases wait for and make, what families do otherwise, and that kernels say the same."""

from dataclasses import replace

import pytest

from cheetah.generate import choose_plan, generate_kernel
from cheetah.models.dense.page import page_of, page_of_head, require_common
from cheetah.models.dense.pass_sizes import PassSizes
from cheetah.models.family import layers_text, lines_of
from cheetah.models.layer_kind import AttentionKind, LayerKind
from cheetah.models.registry import preset
from cheetah.plan import GPUS, PlanError
from cheetah.plan.phases import PhaseText
from cheetah.plan.prompt import PassPlan

DEMO = preset("demo")


def about(name: str, phase: str = "qkv", max_context: int = 8192) -> str:
    return next(line.about for line in page_of(preset(name), max_context).layer if line.name == phase)


def test_a_phase_waits_for_what_one_before_it_has_made() -> None:
    page = page_of(DEMO)
    made = set(page.begin.makes)
    assert made == set(page.layer[-1].makes), "the first layer is a layer"
    for line in page.layer:
        made |= set(line.makes)
        assert made.issuperset(line.waits), line
    assert set(page.once[0].waits) == set(page.layer[-1].makes)
    head = page_of_head(DEMO)
    assert head.once[0].waits == head.begin.makes


def test_families_differ_on_the_page() -> None:
    assert about("llama-3.1-8b") == "Norm; q, k, v; rotary embedding; keys and values into the cache."
    assert "norms of heads" in about("qwen3-8b") and "biases" in about("qwen2.5-7b")
    windowed = replace(preset("mistral-7b-v0.3"), sliding_window=4096)
    seen = [line.about for line in page_of(windowed, 8192).layer if line.name == "attention"]
    assert "of the last 4096 keys" in seen[0] and "of the last" not in about("llama-3.1-8b", "attention")


def test_layers_of_two_kinds_are_printed_kind_by_kind() -> None:
    config = replace(DEMO, layers=5, unrotated_layers=(3,))
    when = {one.when: one.about for one in page_of(config).rows if one.name == "qkv"}
    assert list(when) == ["layers 0 to 2, 4", "layers 3"]
    assert "rotary" in when["layers 0 to 2, 4"] and "rotary" not in when["layers 3"]


def test_a_page_is_printed_with_its_matrices() -> None:
    lines = str(page_of(preset("llama-3.1-8b"))).splitlines()
    assert len(lines) == 9 and lines[0].split() == ["when", "name", "waits", "matrix", "makes", "about"]
    assert "layers 0 to 31  gate_up" in lines[5] and "28672 x 4096 bf16" in lines[5]


def test_the_kernel_says_what_the_page_says() -> None:
    text = generate_kernel(DEMO, "emulator").text
    page = page_of(DEMO)
    for line in (*page.layer, *page.once):
        assert all(f"// {part}\n" in text for part in line.text.banner.splitlines()), line


def test_norms_behind_and_multipliers_are_told() -> None:
    lines = {line.name: line for line in page_of(replace(preset("olmo-2-1b"), residual_multiplier=0.5), 64).layer}
    assert list(lines) == ["qkv", "attention", "o", "o_norm", "gate_up", "down", "down_norm"]
    assert lines["o"].about == "o; rows kept for the norm behind them." and lines["o"].makes == ("o_rows_squares",)
    assert lines["o_norm"].about == "Norm of the rows of o; times 0.5, onto the residual."
    assert lines["o_norm"].makes == lines["gate_up"].waits and not lines["qkv"].about.startswith("Norm")


@pytest.mark.parametrize("cut_tokens", [0, 64])
def test_a_pass_reads_what_it_has_written(cut_tokens: int) -> None:
    gpu = GPUS["emulator"]
    pass_plan = PassPlan(tokens=64, tile_tokens=64, warpgroups=1, stages=3, cut_tokens=cut_tokens, key_tile=16)
    sizes = PassSizes(DEMO, gpu, choose_plan(DEMO, gpu), pass_plan)
    written = set(sizes.rows[0].makes.split(", "))
    for phase in sizes.phases:
        assert written.issuperset(phase.waits), phase
        written |= set(phase.makes)
        assert set(phase.makes) <= set(sizes.sections.sizes)
    named = [row.name for row in sizes.rows[1:-1]]
    assert any(name.endswith("-sums") for name in named) == bool(cut_tokens)
    assert named == [name.removeprefix("layer 0 ") for name in sizes.phase_names if name.startswith("layer 0 ")]
    assert len(list(lines_of(sizes.rows))) == len(sizes.rows) + 1


def test_a_banner_leaves_out_what_there_is_not() -> None:
    assert "Makes" not in PhaseText("head", "Logits.", ("hidden",), ()).banner


def test_layers_that_differ_in_what_kernels_have_once_are_refused() -> None:
    """Where nobody asked, the first layer's would be taken for all."""
    alike = LayerKind(attention=AttentionKind(window=5, rope=None))
    require_common([LayerKind(), alike])
    for other, name in (
        (replace(alike, activation="gelu"), r"activation \('silu' and 'gelu'\)"),
        (replace(alike, attention=AttentionKind(sinks=True)), r"sinks \(False and True\)"),
        (replace(alike, residual_multiplier=0.5), "residual_multiplier"),
    ):
        with pytest.raises(PlanError, match=f"layers that differ in {name}.*: kernels know layers that differ in"):
            require_common([LayerKind(), alike, other])


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (range(1), "layers 0"),
        (range(64), "layers 0 to 63"),
        ([0, 1, 3, 4, 6, 8], "layers 0 to 1, 3 to 4, 6, 8"),
        (range(3, 64, 4), "layers 3, 7, ..., 63"),
        ([one for one in range(64) if one % 4 != 3], "layers 0 to 2, 4 to 6, ..., 60 to 62"),
    ],
)
def test_layers_as_people_read_them(layers, text):
    assert layers_text(layers) == text
