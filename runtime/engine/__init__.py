"""Requests in, token ids out: who decodes together, launches and their tables, the cache of keys and values."""
