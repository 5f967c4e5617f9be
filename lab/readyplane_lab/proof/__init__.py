"""Proof: baselines, bounds and scenarios, compared with the planner at equal attainment."""
