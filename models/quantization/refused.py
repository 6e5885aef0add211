"""Ways to quantise that are known and not read, each with what it is: a refusal says more than "unknown"."""

_OWN = "codes in a form of its own"
_KERNEL = "weights in the order of one kernel"
_BLACKWELL = "a format of 4-bit floating point numbers, which this GPU does not multiply"

REFUSED_METHODS = {
    "aqlm": f"codebooks, {_OWN}",
    "auto-round": f"{_OWN}; export it as gptq or awq",
    "auto_round": f"{_OWN}; export it as gptq or awq",
    "bitblas": _KERNEL,
    "bitnet": "ternary weights",
    "bitsandbytes": f"{_OWN}; quantise the original with `cheetah quantize`",
    "eetq": _KERNEL,
    "exl2": "mixed bits of ExLlama",
    "exl3": "trellis codes of ExLlama",
    "fp_quant": _BLACKWELL,
    "gguf": "the format of llama.cpp",
    "gptq_marlin": _KERNEL,
    "gptq_p": _OWN,
    "higgs": f"codebooks, {_OWN}",
    "hqq": f"{_OWN}; quantise the original with `cheetah quantize`",
    "intel/auto-round": f"{_OWN}; export it as gptq or awq",
    "marlin": _KERNEL,
    "mxfp8": "scales that are powers of two, one for 32 numbers",
    "nvfp4": "4-bit floating point numbers in a form that is not named; modelopt's and compressed-tensors' are read",
    "qqq": _KERNEL,
    "quanto": _OWN,
    "quark": _OWN,
    "sinq": _OWN,
    "spqr": "sparse outliers beside dense codes",
    "torchao": "serialised objects of torch",
    "vptq": f"codebooks, {_OWN}",
}
