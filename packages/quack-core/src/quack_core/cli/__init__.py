"""The command ``quack``."""
