"""Phi-3 and Phi-4: fused tensors, heads of which only a part is rotated, and longrope."""

from __future__ import annotations

from cheetah.models.config import ModelConfig
from cheetah.models.config_json import Dialect
from cheetah.models.dense.family import DenseFamily
from cheetah.models.rope import Rope


class Phi3Config(ModelConfig):
    """A Phi-3, Phi-3.5 or Phi-4 model."""

    dialect = Dialect(
        "phi3",
        "Phi3ForCausalLM",
        absent={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        neutral={"lm_head_bias": (False,)},
        ignored=frozenset({"resid_pdrop", "embd_pdrop", "full_attn_mod", "interpolate_factor"}),
        reads=frozenset({"sliding_window", "partial_rotary_factor"}),
        ropes={"su": "longrope", "yarn": "longrope"},  # names of older files
    )
    fused = ("qkv", "gate_up")


_PHI_4_MINI_FACTORS = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)
_PHI_4_MINI_ROPE = Rope(
    10000.0,
    "longrope",
    factor=32.0,
    original_max_position_embeddings=4096,
    partial_rotary_factor=0.75,
    short_factor=(1.0,) * 48,
    long_factor=_PHI_4_MINI_FACTORS,
)

FAMILY = DenseFamily(
    Phi3Config,
    {
        "phi-3-mini-4k": Phi3Config(
            *(3072, 8192, 32, 32, 32, 96, 32064), max_position_embeddings=4096, sliding_window=2047
        ),
        "phi-4-mini": Phi3Config(
            *(3072, 8192, 32, 24, 8, 128, 200064),
            max_position_embeddings=131072,
            tied_embeddings=True,
            rope=_PHI_4_MINI_ROPE,
            sliding_window=262144,
        ),
        "phi-4": Phi3Config(
            *(5120, 17920, 40, 40, 10, 128, 100352), max_position_embeddings=16384, rope=Rope(250000.0)
        ),
    },
)
