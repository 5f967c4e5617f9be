"""The registry: what is immutable, and who holds the bytes now."""
