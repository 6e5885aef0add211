"""The models that Cheetah can turn into a kernel, one package each."""
