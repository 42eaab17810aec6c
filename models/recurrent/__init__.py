"""Decoders in which some layers keep a state per request instead of keys and values per token."""
