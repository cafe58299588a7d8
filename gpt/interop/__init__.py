"""Read and write models in the formats of other projects: Hugging Face and GGUF."""
