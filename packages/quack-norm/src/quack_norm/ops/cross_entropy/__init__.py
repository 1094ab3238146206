"""Cross-entropy of logits and class indices: ``loss = logsumexp(z) - z[target]``."""
