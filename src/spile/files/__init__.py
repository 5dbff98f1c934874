"""Files of a checkpoint: found, checked, digested, written."""
