"""Tunes the parameters of the learned optimiser in the simulator; see `__main__`."""
