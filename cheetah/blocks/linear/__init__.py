"""Matrix products: what brings their input (prologue), the product, what becomes of its rows (epilogue)."""
