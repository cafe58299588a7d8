"""From files to batches. The way of a text, and where each step is:

files               find_files, download, compression     from a path or URL
documents           readers, encodings, python_docs       one reader for each format
chunks              corpus, chunking                      of bounded size
split               scan, split                           the validation text, in one reading
token ids           shards, tokenizer                     each shard is encoded separately
dataset.json        prepare, dataset_cache                written last
TokenDataset        token_dataset, token_files, mixture   token ids of other programs: imported_tokens
(B, T) of a step    batches, bpe_dropout                  a pure function of the seed and the step
"""
