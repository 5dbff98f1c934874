"""Checkpoints made here: random ones, and packed ones from a bf16 source."""
