"""InternLM3: Llama under another name."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope


class InternLM3Config(ModelConfig):
    """An InternLM3 model. Its dynamic rotary embedding changes behind `max_position_embeddings`, which no sequence
    passes, so up to there it is the default one."""

    dialect = Dialect(
        "internlm3",
        "InternLM3ForCausalLM",
        absent={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
        neutral={"qkv_bias": (False,), "bias": (False,)},
        reads=frozenset({"factor"}),  # of the rope behind there
        ropes={"dynamic": "default"},
    )


FAMILY = DenseFamily(
    InternLM3Config,
    {
        "internlm3-8b": InternLM3Config(
            *(4096, 10240, 48, 32, 2, 128, 128512), max_position_embeddings=32768, rope=Rope(50000000.0)
        ),
    },
)
