"""The router: what is alive, and which pair serves a request."""
