"""What a Llama model is: its numbers, checked at construction, and how they are read from a config.json.

A shape that no kernel can be generated for is refused here, with the field's name. How the fields are read from JSON,
and which are refused, stands in `config_json`. Nothing here touches weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cheetah.models.llama.config_json import JSON_NAMES, place_of, read_fields
from cheetah.models.llama.config_json import ConfigError as ConfigError
from cheetah.models.llama.rope import Rope

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
COLUMN_ALIGN = 32  # columns of a packed matrix, and vectors that feed one, are padded to whole tile pairs


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama model's shape and constants. Field names are short; errors name the field of config.json."""

    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    tied_embeddings: bool = False
    rope: Rope = field(default_factory=Rope)

    def __post_init__(self) -> None:
        for name, json_name in JSON_NAMES.items():
            if getattr(self, name) < 1:
                raise ConfigError(f"{json_name} = {getattr(self, name)}: must be at least 1")
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"head_dim = {self.head_dim}: kernels exist for head_dim 64 and 128 only")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"num_attention_heads = {self.query_heads} is not a multiple of num_key_value_heads = {self.kv_heads}"
            )
        if self.group > MAX_GROUP:
            raise ConfigError(
                f"num_attention_heads / num_key_value_heads = {self.query_heads} / {self.kv_heads} = {self.group}: "
                f"at most {MAX_GROUP} query heads may share a key/value head"
            )
        if not self.rms_norm_eps > 0:
            raise ConfigError(f"rms_norm_eps = {self.rms_norm_eps}: must be positive")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def query_rows(self) -> int:
        """Rows of q_proj: query_heads * head_dim; also the columns of o_proj."""
        return self.query_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of k_proj, and of v_proj: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k and v projection."""
        return self.query_rows + 2 * self.kv_rows

    @property
    def padded_hidden(self) -> int:
        """hidden_size rounded up to whole tile pairs (32 columns)."""
        return round_up(self.hidden_size, COLUMN_ALIGN)

    @property
    def padded_intermediate(self) -> int:
        """intermediate_size rounded up to whole tile pairs (32 columns)."""
        return round_up(self.intermediate_size, COLUMN_ALIGN)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 keys and values that one token keeps in the cache, over all layers."""
        return self.layers * 2 * self.kv_rows * 2

    @property
    def parameter_count(self) -> int:
        """Weights of the model; a tied head is counted once."""
        h, f = self.hidden_size, self.intermediate_size
        layer = self.qkv_rows * h + h * self.query_rows + 3 * h * f + 2 * h
        heads = 1 if self.tied_embeddings else 2
        return self.layers * layer + heads * self.vocab_size * h + h

    def to_dict(self) -> dict[str, Any]:
        """The config.json object (transformers 5 spelling) from which `from_json` reads this value back."""
        shape = {json_name: getattr(self, name) for name, json_name in JSON_NAMES.items()}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **shape,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "hidden_act": "silu",
            "rope_parameters": self.rope.to_dict(),
        }

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any], notes: list[str] | None = None) -> LlamaConfig:
        """Read a config.json (its path, or the object itself). Lines worth printing are appended to `notes`."""
        fields = read_fields(source, [] if notes is None else notes)
        try:
            return cls(**fields)
        except ConfigError as problem:
            raise ConfigError(f"{place_of(source)}: {problem}") from problem


_LLAMA3_8X = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_LLAMA3_32X = Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

PRESETS: dict[str, LlamaConfig] = {
    "llama-3.2-1b": LlamaConfig(2048, 8192, 16, 32, 8, 64, **_LLAMA3, tied_embeddings=True, rope=_LLAMA3_32X),
    "llama-3.2-3b": LlamaConfig(3072, 8192, 28, 24, 8, 128, **_LLAMA3, tied_embeddings=True, rope=_LLAMA3_32X),
    "llama-3.1-8b": LlamaConfig(4096, 14336, 32, 32, 8, 128, **_LLAMA3, rope=_LLAMA3_8X),
    "llama-3.1-70b": LlamaConfig(8192, 28672, 80, 64, 8, 128, **_LLAMA3, rope=_LLAMA3_8X),
}
DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent.parent / "demo" / "files"
PRESET_NAMES = (*PRESETS, DEMO)


def preset(name: str) -> LlamaConfig:
    """The configuration of that name; "demo" is read from the demo model that the package carries."""
    if name == DEMO:
        return LlamaConfig.from_json(DEMO_FOLDER / "config.json")
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; presets: {', '.join(PRESET_NAMES)}")
    return PRESETS[name]


def resolve_config(name_or_path: str | Path, notes: list[str] | None = None) -> LlamaConfig:
    """A preset's name, a model folder, or the path of a config.json. Never touches the network."""
    if str(name_or_path) in PRESET_NAMES:
        return preset(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{name_or_path}: neither a preset ({', '.join(PRESET_NAMES)}) nor a folder with a config.json "
            "nor the path of a config.json"
        )
    return LlamaConfig.from_json(path, notes)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
