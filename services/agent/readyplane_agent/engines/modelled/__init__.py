"""The modelled engine: a process that speaks what vLLM speaks, with latencies from a profile."""
