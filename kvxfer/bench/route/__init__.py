"""What the router costs, and what its policies gain: stand-in engines, a load generator, and a simulation."""
