"""The whole system on one machine: stores, services, workers, traffic."""
