"""A module that the kernel module imports: its text belongs to the kernel's fingerprint."""

FACTOR = 1.0
