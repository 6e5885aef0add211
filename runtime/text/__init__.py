"""Text in, ids out and back: tokenizers, chat templates, streams that hold back what is not yet a character."""
