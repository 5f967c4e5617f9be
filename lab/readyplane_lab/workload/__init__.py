"""What is asked of a fleet: requests read from public traces or drawn by our own generators."""
