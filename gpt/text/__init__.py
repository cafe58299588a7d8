"""From files to batches: corpora, tokenizers, prepared token ids."""
