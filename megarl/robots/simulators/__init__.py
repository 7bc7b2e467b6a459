"""Code that runs in a simulator's interpreter, without megarl: standard library, numpy, and the simulator's package."""
