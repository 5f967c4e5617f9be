"""The production brains and use-cases on virtual time, with modelled engines, links and start-ups."""
