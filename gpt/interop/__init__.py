"""Read and write models in the formats of other projects: Hugging Face, GGUF and nanoGPT."""
