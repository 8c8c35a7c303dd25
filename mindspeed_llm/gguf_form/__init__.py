"""GGUF files as models in Hugging Face form: their config, tensors and tokenizer."""
