"""From files to batches: corpora, tokenizers and prepared token ids."""
