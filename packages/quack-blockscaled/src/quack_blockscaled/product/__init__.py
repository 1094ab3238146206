"""Products of block-scaled operands: one kernel per architecture."""
