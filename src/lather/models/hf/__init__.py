"""Models from and to Hugging Face folders."""
