"""Answers on a terminal, and a conversation with whoever types there."""
