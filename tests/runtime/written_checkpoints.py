"""Small checkpoints that tests write, whole or falsified."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from cheetah.errors import CheetahError
from cheetah.models.dense.weights import tensor_shapes
from cheetah.models.llama import LlamaConfig
from cheetah.runtime.checkpoint.loading import open_checkpoint

CONFIG = LlamaConfig(
    hidden_size=48, intermediate_size=40, layers=2, query_heads=4, kv_heads=2, head_dim=64, vocab_size=50
)
BF16 = ml_dtypes.bfloat16
Q = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def random_values(config=CONFIG, dtype=BF16):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in tensor_shapes(config).items()}


def write_config(folder, config=CONFIG, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **changes}))


def write_model(folder, tensors=None, config=CONFIG, **changes):
    write_config(folder, config, **changes)
    save_file(random_values(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, tensors=None, count=3):
    """A sharded model; gives the weight map, which the caller may falsify and write with `write_index`."""
    write_config(folder)
    tensors = random_values() if tensors is None else tensors
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map, sum(value.nbytes for value in tensors.values()))
    return weight_map


def write_index(folder, weight_map, total_size):
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(*arguments, **named):
    with pytest.raises(CheetahError) as raised:
        open_checkpoint(*arguments, **named)
    return str(raised.value)
