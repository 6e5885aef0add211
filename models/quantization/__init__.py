"""How a checkpoint says that its weights are quantised, read from its configuration files alone."""

from cheetah.models.quantization.reading import quantization_of_folder, read_quantization
from cheetah.models.quantization.statement import Quantization, Storage

__all__ = ["Quantization", "Storage", "quantization_of_folder", "read_quantization"]
