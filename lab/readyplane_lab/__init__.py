"""The lab: where all of it runs on one machine."""
