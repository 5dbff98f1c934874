"""Logits into an answer, a token at a time."""
