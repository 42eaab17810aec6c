"""Small Flax decoders over the pools, and everything between a checkpoint on disk and tokens."""
