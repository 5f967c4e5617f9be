"""The agent: beside each engine, turns a wanted worker into a ready one."""
