"""Inference engines behind one port: what the agent may ask of an engine, whoever made it."""
