"""What everyone knows, as plain values: identities, workers, profiles, work, start-up, errors.

Pure: standard library, numpy, scipy.optimize and xxhash; no clock, no I/O, no async, no logging.
"""
