"""megatrain: full fine-tuning of language models far larger than the memory of one GPU."""

__version__ = "0.1.0"
