"""Readyplane: the parts every service, worker and user knows."""
