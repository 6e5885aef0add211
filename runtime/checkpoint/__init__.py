"""From a folder or a hub id to a model's configuration and its tensors, checked."""
