"""The fluid mode of the simulator: pools as queues, for sweeps of thousands of runs."""

from readyplane_lab.simulator.fluid.arrivals import Arrivals, arrivals_of, binned
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.fluid.run import run_fluid

__all__ = ["Arrivals", "FluidOptions", "arrivals_of", "binned", "run_fluid"]
