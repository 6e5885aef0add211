"""From a configuration to what can be launched: the kernel, its machine code, memory, weights on the device."""
