"""Which experts are in memory, how they come there, and what a budget allows."""
