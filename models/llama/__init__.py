"""The Llama family: its configuration, its weights, its meaning in float32, and its decode step as one kernel."""
