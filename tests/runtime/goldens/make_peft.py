"""Makes the adapters `peft*`: as PEFT writes them, with what PEFT makes of the small checkpoint by them.

    python -m tests.runtime.goldens.make_peft

needs torch, transformers 5 and peft; the test that reads them needs none. Kept of each are its two files, and in
`merged.safetensors`, in float32, some matrices as PEFT merges them, and the logits of the model with the adapter beside
it, not merged.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.runtime.written_checkpoints import BF16, CONFIG, random_values, write_model

ADAPTERS = {
    "peft": LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"),
    "peft_rooted": LoraConfig(r=3, lora_alpha=2, use_rslora=True, target_modules=["q_proj", "k_proj", "down_proj"]),
}
KEPT = ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight")
PROMPT = [3, 14, 15, 9, 26, 5, 35]


def small_values() -> dict[str, Any]:
    """The tensors of the checkpoint: of matrices an eighth of those that other tests take, which is exact."""
    return {name: value if value.ndim == 1 else (value * 0.125).astype(BF16) for name, value in random_values().items()}


def make(name: str, config: LoraConfig, base: Path) -> None:
    """One adapter, of random numbers that change the model by about a fifth."""
    torch.manual_seed(len(name))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = Path(__file__).parent / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
        merged = model.merge_and_unload().state_dict()
    save_file({"logits": logits, **{kept: merged[kept] for kept in KEPT}}, folder / "merged.safetensors")


def main() -> None:
    """Both adapters, of the checkpoint that tests write."""
    with tempfile.TemporaryDirectory() as folder:
        base = write_model(Path(folder) / "model", small_values(), CONFIG)
        for name, config in ADAPTERS.items():
            make(name, config, base)


if __name__ == "__main__":
    main()
