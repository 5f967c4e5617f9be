"""The fluid mode of the simulator: pools as queues, for sweeps of thousands of runs.

The brain, its memory, the policy, measured starts and the start-ups themselves (draws, contention
for the store and for peers) are those of the event mode; what is modelled anew is what engines,
router and gateway do to a request. The unit is a row: one request, or many alike (`weight`).

A row's way:

1.  It waits in the router, first come first served, and is bound to a prefill worker that has no
    more than `prefill_ahead_s` of work left, provided that a decode worker promises it a place: a
    free sequence, KV for its prompt and its likely answer, and an iteration time within the TPOT
    target, as in the router's brain. Up to eight rows behind one that finds no place are looked
    at. Who waits for 20 s is refused, and so is who finds the queue full.
2.  Prefill takes the class profile's seconds for the tokens that no cache holds. Single rows take
    the server that is free first, each played exactly (`prefill.Servers`). Rows of many requests
    are a stream through one server as fast as the pool (`prefill.Stream`): the wait is the backlog
    ahead, exactly; while nothing is backed up, it is Sakasegawa's approximation of M/G/c for the
    last half minute's load, spread exponentially over the rows by a fixed sequence.
3.  The KV takes the link's time, one transfer alone. A sequence is admitted, and joins, between two
    iterations, so a busy decode worker adds half an iteration, whole iterations that cover the
    transfer, and the first token's own.
4.  Decode is processor sharing, exactly (`decode.Batch`): iterations take a + b * sequences +
    c * KV tokens, a virtual clock counts tokens, and who joins at v leaves at v + osl. Single rows
    have a batch for each worker. Where rows are many requests, workers that hold about as much each
    are one batch; a new one stands apart until it has caught up, and a draining one leaves with its
    share. Whatever has not ended after 120 s is given up.
5.  Convertible decode workers take prompts in chunks when a row has waited 0.5 s and the prefill
    pool is still busy, up to 0.5 s of such work; it stalls the sequences that decode there.

What prefix caches hold is told per worker for single rows: a worker holds every prefix that it has
computed, and a prompt goes to whoever is through with it first, given what each one holds. What has
been evicted is judged by one cache, least recently used first out, as large as those of the first
prefill workers together. Rows of many requests find what that one cache holds. There is no
preemption. A drained worker leaves with its first renewal after it has become idle, every half
second, and a crashed one is shown for as long as its lease lasts. The planner's signals are exact and of this moment, where engines in the event
mode report every two seconds.

Steps of `step_s` only pace the floor: within one, arrivals, starts, prefill and decode keep their
own times. A queue that waits for decode room is looked at every 0.1 s.

`docs/simulator.md` tells how far this agrees with the event mode.
"""

from readyplane_lab.simulator.fluid.arrivals import Arrivals, arrivals_of, binned
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.fluid.run import run_fluid

__all__ = ["Arrivals", "FluidOptions", "arrivals_of", "binned", "run_fluid"]
