"""The gateway: turns a pair into a served request."""
