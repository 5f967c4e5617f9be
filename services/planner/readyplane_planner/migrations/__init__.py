"""Schema of the planner's journal, run by `readyplane.kit.database.migrate`."""
