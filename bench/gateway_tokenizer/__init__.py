"""What stands for the package `tokenizers` in the gateway's bench; on its path, not installed."""
