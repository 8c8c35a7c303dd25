"""Reading Hugging Face configs and tokenizers."""
