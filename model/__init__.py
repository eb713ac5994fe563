"""GPT-2, the registry of its attention variants, its loss, and conversion from and to Hugging Face."""
