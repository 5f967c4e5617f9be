"""Measured class profiles that ship with the product, as JSON with their sources."""
