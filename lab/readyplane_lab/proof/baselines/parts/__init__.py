"""What several rules share: the facts that they read and the brain that keeps their state."""
