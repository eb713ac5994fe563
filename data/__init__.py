"""Corpora, tokenizers, preparation of token files, and loading of batches."""
