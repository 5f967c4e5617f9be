"""The planner: what should be, and why."""
