"""What is installed, reachable and healthy here, and what to do about the rest: `dflop doctor`."""
