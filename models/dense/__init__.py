"""What dense decoders have in common: weights and their packing, the decode step, and its meaning in float32."""
