"""The oracle: what a workload costs at least, and what a planner that knows it would do (pure)."""
