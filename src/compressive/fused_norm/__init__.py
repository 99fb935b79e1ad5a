"""Batch norms of ResNets with faster sums over the batch, for training on a GPU."""
