"""Top-k: the k largest elements of each row and their indices, ties to the smaller index."""
