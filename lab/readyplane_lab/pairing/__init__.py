"""Ways of choosing a pair, compared on one fixed fleet in the simulator (`make bench-pairing`)."""
