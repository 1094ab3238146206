"""Softmax and log-softmax over one dimension, forward and backward."""
