"""The registry's tables, revision by revision; `readyplane.kit.database.migrate` runs them."""
