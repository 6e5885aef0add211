"""The version, for every part: what imports it knows nothing else of the package."""

__version__ = "0.1.0"
