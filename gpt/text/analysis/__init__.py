"""Looking at a text: simple predictors of it, passages copied from it, prompts found in it."""
