"""The figures that FlashFormer's paper prints (arXiv 2505.22758), to stand beside ours; none of them was measured here.

One H100 SXM, 3350 GB/s by specification; decode only, 128 tokens made. The paper gives no spread.
"""

from __future__ import annotations

MACHINE = "paper, H100"
GB_PER_S = 3350

LINEAR_MS = {
    (2048, 1): (0.013, 0.013, 0.012),
    (2048, 4): (0.050, 0.029, 0.027),
    (2048, 32): (0.403, 0.169, 0.154),
    (4096, 1): (0.021, 0.021, 0.021),
    (4096, 4): (0.084, 0.060, 0.060),
    (4096, 32): (0.675, 0.423, 0.423),
    (8192, 1): (0.062, 0.062, 0.062),
    (8192, 4): (0.250, 0.221, 0.218),
    (8192, 32): (1.998, 1.543, 1.513),
}
"""Table 4. (size, layers): milliseconds of a kernel a layer, of one kernel with a grid barrier a layer, and of that
with memory reads that overlap across layers."""

STACKS_MS = {
    ("attention", 1): (0.089, 0.089, 0.090),
    ("attention", 4): (0.357, 0.264, 0.256),
    ("attention", 32): (2.857, 1.761, 1.683),
    ("glu", 1): (0.122, 0.122, 0.122),
    ("glu", 4): (0.488, 0.466, 0.464),
    ("glu", 32): (3.905, 3.689, 3.661),
}
"""Table 9. (stack, layers): as above. The contexts of its attention stacks are not known to us."""

STEP_TOKENS_PER_S = {
    ("llama-3.1-8b", 128): (168, 146, 184),
    ("llama-3.1-8b", 1024): (159, 144, 182),
    ("llama-3.1-8b", 3072): (158, 141, 180),
    ("llama-3.1-8b", 6144): (143, 138, 176),
}
"""Table 6, bf16. (model, prompt length): tokens/s of gpt-fast, vLLM, FlashFormer."""

BATCH_TOKENS_PER_S = {
    (2, 128): (308, 286, 328),
    (4, 128): (608, 564, 616),
    (2, 1024): (556, 560, 648),
    (4, 1024): (504, 548, 600),
}
"""Table 7, 8B bf16. (sequences, prompt length): tokens/s of all together, of gpt-fast, vLLM, FlashFormer. As printed:
the rows of 2 and 4 sequences at 1024 look exchanged."""

RING_TOKENS_PER_S = {(64, 2): 170, (64, 3): 179, (32, 3): 143, (32, 4): 138, (32, 5): 130}
"""Table 8, 8B bf16 at 3072. (KB of a stage, stages): tokens/s."""


def milliseconds(figures: tuple[float, float, float] | None) -> str:
    """A kernel a layer, one kernel, one kernel with overlap, in microseconds as our tables have them; "" for none."""
    return "" if figures is None else " / ".join(f"{1e3 * figure:.0f} us" for figure in figures)


def speeds(figures: tuple[int, int, int] | None, bytes_per_step: float) -> str:
    """gpt-fast, vLLM, FlashFormer with its share of the specification; "" for none."""
    if figures is None:
        return ""
    *others, flashformer = figures
    share = flashformer * bytes_per_step / 1e9 / GB_PER_S
    return " / ".join([*map(str, others), f"{flashformer} ({share:.1%})"])
