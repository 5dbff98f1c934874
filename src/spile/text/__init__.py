"""Text into token ids and back, with all that a tokenizer's folder says about it."""
