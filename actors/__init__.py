"""Floor 1: acting. Engines, environments, rollouts and the trajectories that they produce."""
